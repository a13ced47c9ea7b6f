"""Tensors with made-up values: as a step would meet them, and valid where operators insist on it."""

import math

import torch
from torch import Tensor

from ridgeline.probe.operators.rebuild import dtype_of
from ridgeline.probe.operators.valid_inputs import Made
from ridgeline.workload import TensorSpec

TILE_ELEMENTS = 65_521
"""Random values are drawn for one tile and repeated: they matter less than the time to draw them. A prime,
so that no two rows of a matrix are equal and sums over them do not grow."""

INTEGERS = Made("index", 2)
"""Integers that no operator indexes with: 0 and 1 mean something everywhere (masks, types of a token)."""


def empty(spec: TensorSpec, device: torch.device) -> Tensor:
    """A tensor of this shape, stride and dtype with whatever values memory holds."""
    place = torch.device("cpu") if spec.on_host else device
    return torch.empty_strided(spec.shape, spec.stride, dtype=dtype_of(spec), device=place)


def stand_in(spec: TensorSpec, device: torch.device) -> Tensor:
    """What an op would have made that was not issued; integers are 0, a valid index nearly everywhere."""
    tensor = empty(spec, device)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        _storage(tensor).zero_()
    return tensor


def made_up(spec: TensorSpec, device: torch.device, made: Made | None = None) -> Tensor:
    """A tensor of this shape, stride and dtype.

    Args:
        spec: Its role decides about floats: weights that keep the size of what they are multiplied with,
            states of an optimizer that have a square root, so that numbers stay ordinary throughout a step.
        device: Where to make it, unless the spec says on the host.
        made: What its values must be; None: anything.
    """
    tensor = empty(spec, device)
    refill(tensor, spec, made)
    return tensor


def refill(tensor: Tensor, spec: TensorSpec, made: Made | None = None) -> None:
    """Give a tensor values as `made_up` does."""
    is_real = tensor.is_floating_point() or tensor.is_complex()
    # By order and exactly: a sum that misses by one makes operators refuse.
    if made is not None and made.kind not in ("index", "odds"):
        _fill_by_order(tensor, made)
    elif is_real:
        low, high = (0.05, 0.95) if made is not None else _range(spec)
        _repeat(tensor, low, high)
    else:
        wanted = made or INTEGERS
        _repeat(tensor, wanted.least, max(wanted.bound, wanted.least + 1))


def _range(spec: TensorSpec) -> tuple[float, float]:
    """Smallest and largest float of a tensor by its role.

    Source: a matrix of independent values in (-sqrt(3 / n), sqrt(3 / n)), n to a row, keeps the variance
        of what it is multiplied with (Glorot, Bengio 2010); what scales (norms) is around 1.
    """
    if spec.role == "state":
        return 1e-3, 0.1
    if spec.role in ("parameter", "buffer"):
        per_row = math.prod(spec.shape[1:])
        if per_row <= 1:
            return 0.5, 1.5
        bound = math.sqrt(3.0 / per_row)
        return -bound, bound
    return (-1.0, 1.0) if spec.role == "batch" else (-0.1, 0.1)


def _storage(tensor: Tensor) -> Tensor:
    """All elements of a tensor's storage: strides may leave gaps or overlap (expanded tensors)."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((size,), (1,), 0)


def _repeat(tensor: Tensor, low: float, high: float) -> None:
    """Fill a storage with random values, one tile of floats again and again; indices are all drawn."""
    flat = _storage(tensor)
    if flat.numel() == 0:
        return
    has_tile = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    size = min(TILE_ELEMENTS, flat.numel()) if has_tile else flat.numel()
    if tensor.dtype == torch.bool:
        tile = torch.empty(size, dtype=torch.uint8, device=flat.device).random_(0, 2)
    elif tensor.is_floating_point():
        tile = torch.empty(size, device=flat.device).uniform_(low, high)
    elif tensor.is_complex():
        tile = torch.zeros(size, device=flat.device)
    else:
        # Bounds may exceed small dtypes, whose values then end at their largest.
        top = min(int(high), torch.iinfo(tensor.dtype).max)
        tile = torch.empty(size, dtype=torch.int64, device=flat.device).random_(int(low), top)
    tile = tile.to(tensor.dtype)  # not every dtype can be drawn
    # Tile by tile in one copy: a loop over tiles would launch thousands of kernels.
    whole = flat.numel() // size * size
    flat[:whole].view(-1, size).copy_(tile.expand(whole // size, -1))
    flat[whole:].copy_(tile[: flat.numel() - whole])


def _fill_by_order(tensor: Tensor, made: Made) -> None:
    """Values that depend on their position: ascending, with a given sum, or a given number of them."""
    count = tensor.numel()
    if made.kind == "constant" or count == 0:
        _storage(tensor).fill_(made.bound)
        return
    place = torch.arange(count, device=tensor.device)
    if made.kind == "starts":
        values = place * made.bound // count
    elif made.kind == "bounds":
        values = place * made.bound // max(1, count - 1)
    elif made.kind == "parts":
        values = (place + 1) * made.bound // count - place * made.bound // count
    else:  # as far from each other as they can be
        values = (place + 1) * made.bound // count > place * made.bound // count
    tensor.copy_(values.view(tensor.shape))
