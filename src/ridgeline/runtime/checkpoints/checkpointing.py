"""State that belongs to a single worker, saved to checkpoints and restored on the worker that it belongs to.

This is the state of its synchronizer and, where workers train alone between two exchanges, also its
parameters, buffers and optimizer state. Those of the first worker are in the checkpoint itself.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError
from ridgeline.runtime.checkpoints.state_tree import flatten, like_parameters, restore
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.workers import attendance
from ridgeline.workers.agree import gather_bytes
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


class _OwnTree(Value, frozen=True, kw_only=True):
    """What a worker sends to the others of its own state, or why it has none to send."""

    tree: Any = None
    error: str = ""


def gathered(synchronizer: Synchronizer | None, world: World) -> dict[str, Tensor]:
    """What the synchronizers of all workers remember, on the CPU of the first one; nothing on the others.

    Args:
        synchronizer: This worker's.
        world: This worker's place.

    Returns:
        `sync.<rank>.<name>` to tensors of their own memory.

    Cost: See `gather_tensors`.
    """
    if synchronizer is None:
        return {}
    state = synchronizer.state_dict()
    saved = {name: tensor for name, tensor in state.items() if not name.startswith(UNSAVED)}
    return gather_tensors(saved, world, PREFIX)


def gathered_own(
    synchronizer: Synchronizer | None, model: nn.Module, optimizer: Optimizer, world: World
) -> OwnState:
    """The state of workers that train alone between two exchanges, on the first one of them.

    Raises:
        CheckpointError: the state of a worker is not plain, or could not be taken; on all workers. The one
            whose it is raises another error than this as it is.

    Cost: See `gather_tensors`.
    """
    if synchronizer is None or not synchronizer.trains_apart:
        return OwnState([], {})
    tensors: dict[str, Tensor] = {}
    failed: Exception | None = None
    message = msgspec.json.encode(_OwnTree())
    if world.rank:
        try:
            state = {
                "model": dict(model.state_dict()),
                "optimizer": optimizer.state_dict()["state"],
            }
            message = msgspec.json.encode(_OwnTree(tree=flatten(state, "state", tensors)))
        except Exception as error:  # noqa: BLE001 - raised again once the others know, who wait for it below
            failed = error
            message = msgspec.json.encode(_OwnTree(error=told(error, world.rank)))
    found = [msgspec.json.decode(data, type=_OwnTree) for data in gather_bytes(message, world)]
    failure = next((each.error for each in found if each.error), "")
    if failure:
        raise failed or CheckpointError(failure)
    return OwnState([each.tree for each in found], gather_tensors(tensors, world, OWN))


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
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # `load_state_dict` takes no state without groups; those of the checkpoint were loaded already.
    groups = optimizer.state_dict()["param_groups"]
    own = like_parameters({"state": state["optimizer"]}, parameters)
    optimizer.load_state_dict({**own, "param_groups": groups})


def gather_tensors(mine: Mapping[str, Tensor], world: World, prefix: str) -> dict[str, Tensor]:
    """Tensors of all workers, on the CPU of the first one; nothing on the others.

    Args:
        mine: Of this worker; names, shapes and types may be others than those of other workers.
        world: This worker's place.
        prefix: Head of the names.

    Returns:
        `<prefix><rank>.<name>` to tensors of their own memory.

    Cost: A small exchange, and one gathering for each tensor that any worker has; on the first worker the
        memory of all workers' tensors on the host, and of one tensor from each of them on its device.
    """
    specs = [(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in mine.items()]
    told = gather_bytes(msgspec.json.encode(specs), world)
    # Dicts, not sets, whose order differs between processes: all come to the same gatherings in turn.
    held = [dict.fromkeys(msgspec.json.decode(data, type=list[_Spec])) for data in told]
    found: dict[str, Tensor] = {}
    for spec in dict.fromkeys(spec for each in held for spec in each):
        name, shape, kind = spec
        own = spec in held[world.rank]
        dtype = getattr(torch, kind)
        # A gathering takes all workers, so that who has no such tensor joins with zeros.
        carrier = mine[name].detach() if own else torch.zeros(shape, dtype=dtype, device="cpu")
        parts = _gather(carrier.to(world.device).contiguous(), name, world)
        for rank, part in enumerate(parts):
            if spec in held[rank]:
                found[f"{prefix}{rank}.{name}"] = part.cpu()
    return found


def of_worker(tensors: Mapping[str, Tensor], rank: int, prefix: str = PREFIX) -> dict[str, Tensor]:
    """The entries of one worker out of those gathered."""
    own = f"{prefix}{rank}."
    return {n.removeprefix(own): tensor for n, tensor in tensors.items() if n.startswith(own)}


def _gather(carrier: Tensor, name: str, world: World) -> list[Tensor]:
    """The tensor of each worker, on the first one."""
    is_first = world.rank == 0
    parts = [torch.empty_like(carrier) for _ in range(world.size)] if is_first else None
    # Collectives take no empty tensors; all workers know the shape, and leave it out together.
    if carrier.numel():
        # As bytes: the backends do not take one list of dtypes.
        flats = None if parts is None else [_bytes(part) for part in parts]
        with attendance.meeting(f"the gathering of {name}", world):
            dist.gather(_bytes(carrier), flats, group=world.group(), group_dst=0)
    return parts or []


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
