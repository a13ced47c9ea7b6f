"""State that belongs to a single worker, saved to checkpoints and restored on the worker that it belongs to.

This is the state of its synchronizer and, where workers train alone between two exchanges, also its
parameters, buffers and optimizer state. Those of the first worker are in the checkpoint itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.runtime.checkpoints.state_tree import flatten, like_parameters, restore
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.workers.agree import gather_bytes, gather_tensor
from ridgeline.workers.world import World

PREFIX = "sync."
OWN = "own."
UNSAVED = "unsaved."
"""Head of the names of what a synchronizer shows to who undoes steps alone: checkpoints have it elsewhere."""
_Spec = tuple[str, tuple[int, ...], str]
"""Name, shape and dtype (as torch prints it, without the prefix) of a tensor."""


class OwnState(NamedTuple):
    """Parameters, buffers and optimizer state of workers; nothing where all hold the same.

    Attributes:
        trees: By rank, the JSON form of the state; see `state_tree`.
        tensors: On the first worker `own.<rank>.<name>` to CPU tensors.
    """

    trees: list[Any]
    tensors: dict[str, Tensor]


class _Share(Value, frozen=True, kw_only=True):
    """What a worker sends to the others of its own state, or why it has none to send."""

    specs: tuple[_Spec, ...] = ()
    tree: Any = None
    error: str = ""


def gathered(synchronizer: Synchronizer | None, world: World) -> dict[str, Tensor]:
    """What the synchronizers of all workers remember, on the CPU of the first one; nothing on the others.

    Returns:
        `sync.<rank>.<name>` to tensors of their own memory.

    Raises:
        CheckpointError: that of a worker could not be taken; on all workers. The one whose it is raises
            another error than this as it is.

    Cost: See `_gathered`.
    """
    if synchronizer is None:
        return {}

    def take(tensors: dict[str, Tensor]) -> None:
        state = synchronizer.state_dict()
        tensors |= {name: value for name, value in state.items() if not name.startswith(UNSAVED)}

    return _gathered(take, world, PREFIX).tensors


def gathered_own(
    synchronizer: Synchronizer | None, model: nn.Module, optimizer: Optimizer, world: World
) -> OwnState:
    """The state of workers that train alone between two exchanges, on the first one of them.

    Raises:
        CheckpointError: as `gathered`; or the state of a worker is not plain.

    Cost: See `_gathered`.
    """
    if synchronizer is None or not synchronizer.trains_apart:
        return OwnState([], {})

    def take(tensors: dict[str, Tensor]) -> Any:
        if not world.rank:
            return None
        saved = optimizer.state_dict()
        # Settings are every worker's, but what is part of them in a form of the optimizer's own is not known.
        own = {"optimizer": saved["state"]} if "state" in saved else {"whole": saved}
        return flatten({"model": dict(model.state_dict()), **own}, "state", tensors)

    return _gathered(take, world, OWN)


def told(error: Exception, rank: int) -> str:
    """What the other workers are told of an error by which a worker cannot save its state."""
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"wanted to save the state of the run, got {type(error).__name__}: {error} on rank {rank}; the "
        "previous checkpoint is untouched: continue with --resume"
    )


def take_own(
    tree: Any, tensors: Mapping[str, Tensor], model: nn.Module, optimizer: Optimizer
) -> None:
    """Restore the state of this worker alone; the optimizer's settings stay as they are.

    Args:
        tree: Of this worker, of `OwnState.trees`; None changes nothing.
        tensors: Of this worker; see `of_worker`.
        model: Changed in place.
        optimizer: Likewise.

    Raises:
        CheckpointError: a tensor is missing.
    """
    if tree is None:
        return
    state = restore(tree, tensors)
    model.load_state_dict(state["model"])
    if "whole" in state:
        optimizer.load_state_dict(state["whole"])
        return
    parameters = parameters_of(optimizer)
    # `load_state_dict` takes no state without groups; those of the checkpoint were loaded already.
    groups = optimizer.state_dict()["param_groups"]
    own = like_parameters({"state": state["optimizer"]}, parameters)
    optimizer.load_state_dict({**own, "param_groups": groups})


def of_worker(tensors: Mapping[str, Tensor], rank: int, prefix: str = PREFIX) -> dict[str, Tensor]:
    """The entries of one worker out of those gathered."""
    own = f"{prefix}{rank}."
    return {n.removeprefix(own): tensor for n, tensor in tensors.items() if n.startswith(own)}


def shared_out(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each of another number of workers is to remember: the mean of what all had.

    What n workers left out of their gradients was to change the mean by an n-th of its sum. Where each of m
    has an n-th of that sum, their mean changes by as much. What is the same on all workers stays what it is.

    Args:
        tensors: Those gathered, by `gathered`, of workers that remember tensors of the same names and shapes.
    """
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith(PREFIX):
            found.setdefault(name.removeprefix(PREFIX).partition(".")[2], []).append(tensor)
    return {name: _mean(parts) for name, parts in found.items()}


def _mean(parts: Sequence[Tensor]) -> Tensor:
    first = parts[0]
    # Equal bits stay equal, which the mean of three need not be.
    if not first.is_floating_point() or all(torch.equal(first, part) for part in parts[1:]):
        return first
    total = torch.zeros_like(first, dtype=torch.float64)
    for part in parts:
        total += part
    return total.div_(len(parts)).to(first.dtype)


def _gathered(take: Callable[[dict[str, Tensor]], Any], world: World, prefix: str) -> OwnState:
    """The state of all workers, on the first one with tensors on its CPU in their own memory.

    Args:
        take: Puts a worker's tensors into a dictionary, whose names, shapes and types may be others than
            those of other workers, and gives the JSON form of the rest.
        world: This worker's place.
        prefix: Head of the names, before the rank.

    Cost: A small exchange, and one gathering for each tensor that any worker has; on the first worker the
        memory of all workers' tensors on the host, and of one tensor from each of them on its device.
    """
    mine: dict[str, Tensor] = {}
    failed: Exception | None = None
    try:
        tree = take(mine)
        specs = tuple((name, tuple(t.shape), _kind(t)) for name, t in mine.items())
        message = msgspec.json.encode(_Share(specs=specs, tree=tree))
    except Exception as error:  # noqa: BLE001 - raised again once the others know, who wait for it below
        failed = error
        message = msgspec.json.encode(_Share(error=told(error, world.rank)))
    shares = [msgspec.json.decode(data, type=_Share) for data in gather_bytes(message, world)]
    failure = next((share.error for share in shares if share.error), "")
    if failure:
        raise failed or CheckpointError(failure)
    held = [frozenset(share.specs) for share in shares]
    found: dict[str, Tensor] = {}
    # A dict, not a set, whose order differs between processes: all come to the same gatherings in turn.
    for spec in dict.fromkeys(spec for share in shares for spec in share.specs):
        name, shape, kind = spec
        # A gathering takes all workers, so that who has no such tensor joins with zeros.
        carrier = torch.zeros(shape, dtype=getattr(torch, kind), device="cpu")
        if spec in held[world.rank]:
            carrier = mine[name].detach()
        parts = gather_tensor(carrier.to(world.device).contiguous(), name, world)
        for rank, part in enumerate(() if parts is None else parts):
            if spec in held[rank]:
                found[f"{prefix}{rank}.{name}"] = part.to("cpu", copy=True)
    return OwnState([share.tree for share in shares], found)


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
