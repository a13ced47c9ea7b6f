"""From the text of a traced operator back to a call: the overload, its arguments, its tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from ridgeline.errors import WorkloadError
from ridgeline.workload import Op, TensorSpec

TILE_ELEMENTS = 1 << 16
"""Random values are drawn for one tile and repeated: they matter less than the time to draw them."""

Arguments = tuple[list[Any], dict[str, Any]]


def resolve(name: str) -> Callable[..., Any]:
    """The operator overload called `name`, e.g. `aten.add.Tensor`.

    Raises:
        WorkloadError: torch here has no such operator.
    """
    found: Any = torch.ops
    parts = name.replace("::", ".").split(".")
    if len(parts) == 2:
        parts.append("default")
    for part in parts:
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError) as error:
            raise WorkloadError(
                f"wanted the operator {name} of the workload, got none of that name in torch "
                f"{torch.__version__}; trace the workload again with this torch"
            ) from error
    return found


def parse(op: Op) -> Arguments:
    """Positional and keyword arguments of an op, tensors still as `{"tensor": i}`.

    Raises:
        WorkloadError: the text is not what tracing writes.
    """
    content = msgspec.json.decode(op.arguments)
    if isinstance(content, dict) and set(content) == {"args", "kwargs"}:
        return content["args"], content["kwargs"]
    raise WorkloadError(
        f'wanted arguments of {op.name} as {{"args": [...], "kwargs": {{...}}}}, got {op.arguments[:80]!r}; '
        "trace the workload again with this release"
    )


def fill(value: Any, tensors: Sequence[Tensor], device: torch.device) -> Any:
    """`value` with encoded tensors, dtypes, devices, layouts and memory formats put in place."""
    if isinstance(value, list):
        return [fill(inner, tensors, device) for inner in value]
    if isinstance(value, dict):
        if "tensor" in value:
            return tensors[value["tensor"]]
        if "device" in value:
            return device
        for kind in ("dtype", "layout", "memory_format"):
            if kind in value:
                return getattr(torch, str(value[kind]).removeprefix("torch."))
        if "float" in value:  # infinities and NaN, which JSON numbers cannot say
            return float(value["float"])
        if "complex" in value:
            return complex(*value["complex"])
        if "generator" in value:
            return None
        raise WorkloadError(
            "wanted an encoded argument (tensor, dtype, device, layout, memory_format, float, complex, "
            f"generator), got {value!r}; trace the workload again with this release"
        )
    return value


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec.

    Raises:
        WorkloadError: torch has no dtype of that name.
    """
    dtype = getattr(torch, spec.dtype.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WorkloadError(
            f"wanted a torch dtype, got {spec.dtype!r} in a tensor of the workload; trace it again"
        )
    return dtype


def empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of this shape, stride and dtype with whatever values memory holds."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype_of(spec), device=device)


def random(spec: TensorSpec, device: torch.device, limit: int) -> Tensor:
    """A tensor of this shape, stride and dtype: floats in (-0.1, 0.1), integers in [0, limit)."""
    tensor = empty(spec, device)
    # Strides may leave gaps or overlap (expanded tensors), so the storage is filled, not the tensor.
    flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    if flat.numel() == 0:
        return tensor
    tile = torch.empty(min(TILE_ELEMENTS, flat.numel()), dtype=tensor.dtype, device=device)
    if tensor.is_floating_point() or tensor.is_complex():
        if tensor.element_size() == 1:  # 8-bit floats cannot be drawn
            tile.copy_(torch.empty_like(tile, dtype=torch.float32).uniform_(-0.1, 0.1))
        else:
            tile.uniform_(-0.1, 0.1) if not tensor.is_complex() else tile.zero_()
    elif tensor.dtype == torch.bool:
        tile.random_(0, 2)
    else:
        tile.random_(0, max(limit, 1))
    whole = flat.numel() // tile.numel() * tile.numel()
    flat[:whole].view(-1, tile.numel()).copy_(tile.expand(whole // tile.numel(), -1))
    flat[whole:].copy_(tile[: flat.numel() - whole])
    return tensor


def index_limit(ops: Sequence[Op]) -> int:
    """Exclusive bound under which an integer is a valid index for every op of a workload.

    One bound serves all integer tensors, since views hide which of them reaches which op.
    """
    return min((limit for op in ops if (limit := _limit_of(op)) is not None), default=2)


def _limit_of(op: Op) -> int | None:
    base = op.name.split(".")[1] if "." in op.name else op.name
    sizes = op.inputs[0].shape if op.inputs else ()
    if base == "embedding" and sizes:
        return sizes[0]
    if base == "embedding_dense_backward":
        return next((v for v in parse(op)[0] if isinstance(v, int) and v > 0), None)
    if base.startswith("nll_loss"):
        scores = max((spec.shape for spec in op.inputs if len(spec.shape) >= 1), key=len)
        return scores[1] if len(scores) > 1 else scores[0]
    if base in ("gather", "index_select", "index_add", "scatter", "scatter_", "scatter_add"):
        return min(sizes, default=1)
    if base in ("index", "index_put", "index_put_", "_index_put_impl_", "take"):
        return min(sizes, default=1)
    return None
