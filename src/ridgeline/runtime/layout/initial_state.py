"""Workers that hold the same parameters train one model, and begin with the same: those of the first of them.

A model that is another one is named at the start, not found as a hang or a wrong mean.

Most scripts seed all workers alike, and trials begin with what an earlier one left: over a slow link what all
have already is not sent once more.
"""

import hashlib
from collections.abc import Mapping, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ridgeline.errors import WorkloadError
from ridgeline.optimizer_forms import sparse_modules
from ridgeline.runtime.layout.ownership import replicated_axes
from ridgeline.runtime.layout.same_state import is_same_model
from ridgeline.workers import attendance
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.mesh import Axis
from ridgeline.workers.world import World

Described = list[tuple[str, str]]
"""(name, what it is) of all parameters and buffers of a model, in their order."""
_UNMADE = "without a shape yet"


def check_same_model(model: nn.Module, world: World) -> None:
    """Every worker must have the same parameters (names, shapes, strides, dtypes, trainability) and buffers.

    And the same layers with sparse gradients, which are exchanged in another way.

    Those along an axis on which the model is replicated are compared; see `layout.ownership`.

    Raises:
        WorkloadError: on all workers, naming those that differ from the first one, and in what; or one that
            has no shape yet.

    Cost: Two small all-gathers, and two more before the error.
    """
    mine = describe(model)
    coded = msgspec.json.encode(mine)
    digest = hashlib.sha256(coded).digest()
    for axis in replicated_axes(world):
        ranks = world.ranks(axis)
        digests = gather_bytes(digest, world, axis)
        others = [r for r, other in zip(ranks, digests, strict=True) if other != digests[0]]
        if others:  # all know it, so that all come to this
            told = [
                msgspec.json.decode(c, type=Described) for c in gather_bytes(coded, world, axis)
            ]
            by_rank = dict(zip(ranks, told, strict=True))
            raise WorkloadError(
                f"wanted the same model on all {len(ranks)} workers, got "
                f"{difference(by_rank, ranks[0], others)}; build the same model on every worker"
            )
    _check_made(mine)  # behind the exchange, at which others would wait


def describe(model: nn.Module) -> Described:
    """What workers have to have alike: names, types, shapes, strides, what is trained and how."""
    by_rows = {f"{name}.weight".lstrip(".") for name in sparse_modules(model)}
    found = []
    for name, parameter in model.named_parameters():
        said = [_kind(parameter)]
        # Workers lay gradients out as their parameters are.
        if not is_lazy(parameter) and not parameter.is_contiguous():
            said.append(f"with strides {tuple(parameter.stride())}")
        said += ["frozen"] * (not parameter.requires_grad)
        said += ["with sparse gradients"] * (name in by_rows)
        found.append((name, " ".join(said)))
    return found + [(name, f"buffer of {_kind(buffer)}") for name, buffer in model.named_buffers()]


def _check_made(told: Described) -> None:
    """See that all have shapes: a layer that takes them from its first batch has none to exchange before.

    Raises:
        WorkloadError: one has none; names it.
    """
    for name, what in told:
        if _UNMADE in what:
            raise WorkloadError(
                f"wanted parameters and buffers that have their shapes among several workers, got {name} of "
                "a lazy module, which takes them from its first batch; call the model once with an example "
                "before the optimizer and the step are made, on every worker"
            )


def _kind(tensor: Tensor) -> str:
    if is_lazy(tensor):
        return _UNMADE
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def difference(by_rank: Mapping[int, Described], first: int, others: Sequence[int]) -> str:
    """The first thing that differs between two workers, and how much does, for messages.

    Args:
        by_rank: What each of the workers has.
        first: With which the others are compared.
        others: That differ from it; the first of them is looked at.
    """
    other = others[0]
    one, two = dict(by_rank[first]), dict(by_rank[other])
    names = [name for name in {**one, **two} if one.get(name) != two.get(name)]
    where = f" on ranks {', '.join(map(str, others))}" if len(others) > 1 else ""
    if not names:
        return f"its parameters and buffers in another order on rank {other} than on rank {first}"
    name = names[0]
    return (
        f"{name} as {two.get(name, 'nothing')} on rank {other}, {one.get(name, 'nothing')} on rank {first} "
        f"({len(names)} of {len({**one, **two})} parameters and buffers differ{where})"
    )


def take_initial_state(model: nn.Module, world: World) -> None:
    """Parameters and buffers of the first worker along each replicated axis, to all, whatever their strides.

    Args:
        model: Changed in place.
        world: This worker's place.

    Raises:
        WorkloadError: a buffer cannot be sent; see `FlatBuffers`.

    Cost: Reads all of them and compares checksums. Where some differ one broadcast a parameter, and one for
        the buffers, of which there is a copy meanwhile.
    """
    buffers = FlatBuffers(model)
    for axis in replicated_axes(world):
        if is_same_model(model, world, axis):
            continue
        group = world.group(axis)
        with torch.no_grad(), attendance.meeting("the broadcast of the initial parameters", world):
            for parameter in model.parameters():
                carrier = parameter.detach().contiguous()
                # As bytes: gloo takes neither complex numbers nor 16-bit integers or 8-bit floats.
                dist.broadcast(carrier.view(-1).view(torch.uint8), group=group, group_src=0)
                if carrier.data_ptr() != parameter.data_ptr():
                    parameter.copy_(carrier)
        with attendance.meeting("the broadcast of the initial buffers", world):
            take_buffers(buffers, world, axis)


def take_buffers(buffers: FlatBuffers, world: World, axis: Axis) -> None:
    """Those of the first worker along an axis, to all.

    Raises:
        WorkloadError: one is gone, or of another shape or type than at first.
    """
    is_first = world.axis_rank(axis) == 0
    if is_first:
        buffers.pack()
    for flat in buffers.flats:
        dist.broadcast(flat, group=world.group(axis), group_src=0)
    if not is_first:
        buffers.unpack()
