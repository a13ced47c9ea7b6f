"""Whether one operator, as it was called, can be held by a CUDA graph: a pure decision."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.lint.lint_rules import OPERATORS


class CalledOperator(NamedTuple):
    """One operator as it was called.

    `is_constant` says of a tensor on the host whether it was made inside the step from Python numbers.
    """

    name: str
    tags: Sequence[torch.Tag]
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    device: str
    is_constant: Callable[[Tensor], bool]


def judge(operation: CalledOperator) -> str | None:
    """The rule that an operator breaks when it is captured on `operation.device`, or None."""
    # Copies first: their arguments are on the host legitimately, which the next rule would refuse.
    copied = _judge_copy(operation)
    if copied is not None:
        return copied or None
    if operation.device != "cpu":
        at_host = _judge_host_work(operation)
        if at_host is not None:
            return at_host or None
    if torch.Tag.nondeterministic_seeded in operation.tags and _has_generator(operation):
        return "own-generator"
    rule = OPERATORS.get(operation.name) or _rule_of_tags(operation.tags)
    breaks = CONDITIONS.get(operation.name)
    return rule if breaks is None or breaks(operation) else None


def _judge_copy(operation: CalledOperator) -> str | None:
    """Copies between host and device; "" where a copy is fine, None where it is none."""
    name, device = operation.name, operation.device
    if name == "aten._to_copy":
        sources, targets = operation.inputs[:1], operation.outputs
        non_blocking = bool(operation.kwargs.get("non_blocking", False))
    elif name in ("aten.copy_", "aten._foreach_copy_"):
        first, second = operation.args[:2]
        targets = [first] if isinstance(first, Tensor) else first
        sources = [second] if isinstance(second, Tensor) else second
        non_blocking = len(operation.args) > 2 and bool(operation.args[2])
        non_blocking = non_blocking or bool(operation.kwargs.get("non_blocking", False))
    else:
        return None
    pairs = [
        (s, t) for s, t in zip(sources, targets, strict=True) if s.device != t.device and s.numel()
    ]
    if not pairs or device == "cpu":
        return None
    for source, target in pairs:
        host = source if source.device.type == "cpu" else target
        # What the copy itself would allocate is not there yet when the capture begins.
        stood_before = any(host is tensor for tensor in operation.inputs)
        if non_blocking and stood_before and host.is_pinned():
            continue
        return "unpinned-copy" if host is source else "host-copy"
    return ""


def _judge_host_work(operation: CalledOperator) -> str | None:
    """Tensors on the host; "" where they are constants only, None where there are none."""
    tensors = (*operation.inputs, *operation.outputs)
    hosted = [tensor for tensor in operation.inputs if tensor.device.type == "cpu"]
    if any(tensor.device.type == operation.device for tensor in tensors):
        # torch moves such indices to the device itself, by a copy that waits.
        if operation.name.startswith("aten.index") and any(tensor.dim() for tensor in hosted):
            return "unpinned-copy"
        return None if all(map(operation.is_constant, hosted)) else "host-tensor"
    if not hosted and not any(tensor.device.type == "cpu" for tensor in operation.outputs):
        return None
    if operation.name == "aten.lift_fresh":
        return ""  # Python numbers became a tensor: as constant as they are
    if torch.Tag.nondeterministic_seeded in operation.tags:
        return "host-randomness"
    if operation.name in ("aten._pin_memory", "aten.pin_memory"):
        return "pinning"
    return "" if all(map(operation.is_constant, hosted)) else "host-tensor"


def _has_generator(operation: CalledOperator) -> bool:
    given = (*operation.args, *operation.kwargs.values())
    return any(isinstance(value, torch.Generator) for value in given)


def _rule_of_tags(tags: Sequence[torch.Tag]) -> str | None:
    """For operators that the table does not know, what torch says of them."""
    if torch.Tag.dynamic_output_shape in tags:
        return "dynamic-shape"
    if torch.Tag.data_dependent_output in tags:
        return "host-sync"
    return "not-capturable" if torch.Tag.cudagraph_unsafe in tags else None


def _masks(operation: CalledOperator) -> list[Tensor]:
    indices = operation.args[1]
    return [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]


def _writes_by_mask(operation: CalledOperator) -> bool:
    """Boolean assignment, unless it is one number for one mask, which torch runs as masked_fill."""
    masks, value = _masks(operation), operation.args[2]
    is_fill = len(masks) == 1 and value.numel() == 1 and value.device.type == "cpu"
    return bool(masks) and not is_fill


def _lacks_output_size(operation: CalledOperator) -> bool:
    return operation.kwargs.get("output_size") is None


CONDITIONS: dict[str, Callable[[CalledOperator], bool]] = {
    "aten.index": lambda operation: bool(_masks(operation)),
    "aten.index_put": _writes_by_mask,
    "aten.index_put_": _writes_by_mask,
    "aten._index_put_impl_": _writes_by_mask,
    "aten.repeat_interleave": _lacks_output_size,
}
"""When an operator of the table breaks its rule; always, if it is not here."""
