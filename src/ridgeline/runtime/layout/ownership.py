"""Who holds what, asked of the mesh: one function for each question.

Along the data axis all workers hold the same parameters; along every other axis each has a part of them.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ridgeline.workers.mesh import AXES, Axis
from ridgeline.workers.world import World

_REPLICATED: tuple[Axis, ...] = ("data",)


def replicated_axes(world: World) -> tuple[Axis, ...]:
    """Axes of several workers along which all hold the same parameters, buffers and optimizer state."""
    return tuple(axis for axis in _REPLICATED if world.axis_size(axis) > 1)


def parted_groups(world: World, *, shards_update: bool = False) -> tuple[ProcessGroup, ...]:
    """Groups of several workers, one for each axis along which gradients are split.

    Args:
        world: Has the axes.
        shards_update: Whether workers with the same parameters have the gradients of a part of them each.
    """
    whole = () if shards_update else _REPLICATED
    parted = [axis for axis in AXES if axis not in whole and world.axis_size(axis) > 1]
    return tuple(world.group(axis) for axis in parted)


def writes_checkpoint(world: World) -> bool:
    """Whether this worker writes its parts to checkpoints: of those that hold the same, the first does."""
    return all(world.axis_rank(axis) == 0 for axis in _REPLICATED)


def total_norm(
    gradients: Sequence[Tensor],
    parted: Sequence[ProcessGroup] = (),
    device: torch.device | None = None,
) -> Tensor:
    """The Euclidean norm of all gradients of the model as one vector, 0-d.

    Args:
        gradients: Of this worker, averaged over those that hold the same parameters.
        parted: Groups over which gradients are split; see `parted_groups`.
        device: Where the norm is to be where there is no gradient; None: on the CPU.

    Cost: Two passes over the gradients, and one small all-reduce a group; does not wait for a GPU.
    """
    norm = nn.utils.get_total_norm(gradients)
    if parted and not gradients:  # a worker may have no part of a small model
        norm = norm.to(device)
    if not parted:
        return norm
    # Workers may have parts of other types, or none, but a collective takes one type. A double holds the
    # square of any norm, where one of half precision beyond 255 would be infinite.
    squared = norm.double().square()
    for group in parted:
        dist.all_reduce(squared, group=group)
    return squared.sqrt().to(torch.promote_types(norm.dtype, torch.float32))


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, parted: Sequence[ProcessGroup] = ()
) -> None:
    """Scale gradients in place so that their total norm is `max_norm` at most.

    Without `parted` this does what `torch.nn.utils.clip_grad_norm_` does, which takes no sparse gradients
    (torch 2.13): of these the rows count, each once.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: Above 0.
        parted: See `total_norm`.

    Cost: See `total_norm`, and one pass more.
    """
    held = list(parameters)
    with torch.no_grad():
        device = held[0].device if held else None
        sparse = {p: p.grad.coalesce() for p in held if p.grad is not None and p.grad.is_sparse}
        dense = [p for p in held if p not in sparse] if sparse else held
        values = [gradient.values() for gradient in sparse.values()]
        gradients = [*(p.grad for p in dense if p.grad is not None), *values]
        norm = total_norm(gradients, parted, device)
        if parted and held:
            # The type that it has in a plain step, whatever parts this worker has: the factor is rounded so.
            norm = norm.to(functools.reduce(torch.promote_types, {p.dtype.to_real() for p in held}))
        nn.utils.clip_grads_with_norm_(dense, max_norm, norm)
        for (parameter, gradient), rows in zip(sparse.items(), values, strict=True):
            rows.mul_(_clipping_factor(norm, max_norm))
            parameter.grad = gradient


def _clipping_factor(norm: Tensor, max_norm: float) -> Tensor:
    """What `clip_grads_with_norm_` scales by. Source: torch/nn/utils/clip_grad.py, release 2.13."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
