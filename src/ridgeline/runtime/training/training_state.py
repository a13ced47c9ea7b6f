"""The state of a training run, saved to and restored from checkpoints.

Saving begins at a step boundary on all workers, since each has its own random state, and may have a part of
the optimizer's; rank 0 gathers these and holds the rest. Restoring reads on rank 0 and sends everything to
the others, so that only one host needs the file, and any number of workers can continue: a worker that holds
a part of something cuts it out. `dcp.load` would have every worker read its part, from files that all hosts
must see.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError
from ridgeline.history import EpochPoint, Outage, StepPoint
from ridgeline.optimizers.groups import parameters_of
from ridgeline.plan import Plan
from ridgeline.runtime.checkpoints import checkpoint, resuming
from ridgeline.runtime.checkpoints.as_made import AsMade, check_dtypes, check_same, in_form_of
from ridgeline.runtime.checkpoints.checkpointing import (
    OWN,
    gathered,
    gathered_own,
    of_worker,
    shared_out,
    told,
)
from ridgeline.runtime.checkpoints.state_tree import flatten, like_parameters, restore
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.runtime.training import schedule
from ridgeline.runtime.training.saver import MODEL, Saver
from ridgeline.state import random_state
from ridgeline.synchronisation import trains_apart
from ridgeline.workers.agree import gather_bytes, share_bytes, share_tensors, share_text
from ridgeline.workers.world import World


class Identity(Value, frozen=True, kw_only=True):
    """Settings that must be equal for a run to be resumed."""

    task: str
    batch_size: int
    seed: int
    num_samples: int


class Course(Value, frozen=True, kw_only=True):
    """The progress and history of a run."""

    position: checkpoint.Position
    loss_sum: float = 0.0
    """Sum of the mean losses of the current epoch's steps."""
    train_s: float = 0.0
    """Seconds of training in the current epoch."""
    steps: tuple[StepPoint, ...] = ()
    epochs: tuple[EpochPoint, ...] = ()
    outages: tuple[Outage, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The objects whose state is saved; `total_steps` is what the scheduler was made for.

    `made` is the optimizer as the task made it.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    total_steps: int
    made: AsMade


class _Header(Value, frozen=True, kw_only=True):
    """What rank 0 sends to the others before the tensors; `error` ends the restoring on all of them."""

    error: str = ""
    path: str = ""
    position: checkpoint.Position | None = None
    state: dict[str, Any] = {}
    specs: dict[str, tuple[list[int], str]] = {}


_UNFIT = (RuntimeError, ValueError, LookupError, TypeError, AttributeError, msgspec.MsgspecError)
"""What torch's loading of a state raises, and the reading of one that others wrote."""


class Resumed(NamedTuple):
    """The progress of the run that is resumed.

    Attributes:
        course: As it was saved.
        found: On rank 0 what was found in the run's directory.
        remembered: For this worker's synchronizer; see `shared_out` where the checkpoint is of another
            number of workers. Nothing where one of the plans exchanges parameters and the other gradients.
        own: The JSON form of what else was this worker's own, for `take_own`; None: nothing, or the same.
        own_tensors: The tensors of it.
        order: Of the parameters in the buckets; empty where none was measured, or by another plan.
    """

    course: Course
    found: resuming.Found | None
    remembered: dict[str, Tensor]
    own: Any
    own_tensors: dict[str, Tensor]
    order: tuple[str, ...]


def save(
    saver: Saver | None,
    trained: Trained,
    course: Course,
    identity: Identity,
    plan: Plan,
    world: World,
    synchronizer: Synchronizer | None = None,
) -> None:
    """Gather and copy the state of all workers and start writing it; `saver` is None but on rank 0.

    Each worker's random state is saved, what its synchronizer remembers, and where workers train alone
    between two exchanges, also the parameters and optimizer state of each.

    Raises:
        CheckpointError: some state is not plain, or the checkpoint before could not be written; on all
            workers. Rank 0 raises other errors (a lack of memory, say) as they are, the others as this one.

    Cost: Copies the state to the host; waits for the device; one gathering of random states, and a small
        broadcast.
    """
    # Collectives, so all workers come here before those without a saver return.
    random_states = gather_bytes(random_state.capture(world), world)
    theirs = gathered(synchronizer, world)
    own = gathered_own(synchronizer, trained.model, trained.optimizer, world)
    if synchronizer is None:
        optimizer = trained.optimizer.state_dict()
    else:  # whole on the first worker, also where each has a part
        optimizer = synchronizer.optimizer_state(trained.optimizer)
    mine: Exception | None = None
    if saver is not None:
        for rank, data in enumerate(random_states):
            # As tensors: rank 0 shares those with all workers anyway, and JSON has no bytes.
            theirs[f"random.{rank}"] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            tensors: dict[str, Tensor] = {}
            state = _tree(trained, optimizer, course, identity, plan, tensors)
            if own.trees:
                state["own"] = own.trees
            if synchronizer is not None:
                state["order"] = list(synchronizer.order())
            saver.save(
                course.position,
                workers=world.size,
                tensors=tensors,
                gathered=theirs | own.tensors,
                state=state,
            )
        except Exception as error:  # noqa: BLE001 - raised again once the others know
            mine = error
    if failure := share_text("" if mine is None else told(mine, 0), world):
        raise mine or CheckpointError(failure)


def _tree(
    trained: Trained,
    optimizer: dict[str, Any],
    course: Course,
    identity: Identity,
    plan: Plan,
    tensors: dict[str, Tensor],
) -> dict[str, Any]:
    """The JSON form of what rank 0 holds of a run; its tensors are put into `tensors`."""
    state: dict[str, Any] = {
        "identity": msgspec.to_builtins(identity),
        "plan": msgspec.to_builtins(plan.settings),
        "course": msgspec.to_builtins(course),
        "model": flatten(dict(trained.model.state_dict()), "model", tensors),
        "optimizer": flatten(optimizer, "optimizer", tensors),
        "made": msgspec.to_builtins(trained.made),
    }
    if trained.scheduler is not None:
        state["scheduler"] = flatten(trained.scheduler.state_dict(), "scheduler", tensors)
        state["total_steps"] = trained.total_steps
    return state


def load(
    directory: Path, trained: Trained, identity: Identity, plan: Plan, world: World
) -> Resumed | None:
    """Put the newest whole checkpoint into the model, optimizer, scheduler and generators of every worker.

    Args:
        directory: Of the run's checkpoints; looked at on rank 0, which chooses and reads for all.
        trained: On the worker's device.
        identity: Of the run that continues.
        plan: By which it continues, which may be another one than that of the checkpoint.
        world: This worker's place; the number of workers may differ from that of the checkpoint.

    Returns:
        None where no checkpoint was ever completed; nothing is changed then.

    Raises:
        CheckpointError: none is whole though there are some; or the newest whole one is of another run, does
            not fit the model, or has the state of another one. On all workers.
    """
    header, tensors, found = _share(directory, world)
    if not header.path:
        return None
    path = Path(header.path)
    try:
        return _take_up(header, tensors, found, trained, identity, plan, world)
    except _UNFIT as error:
        text = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise CheckpointError(
            f"wanted a checkpoint that fits the task, got a mismatch in {path}: {text}; continue with the "
            "task as it was, or train into another run directory"
        ) from error


def _take_up(
    header: _Header,
    tensors: dict[str, Tensor],
    found: resuming.Found | None,
    trained: Trained,
    identity: Identity,
    plan: Plan,
    world: World,
) -> Resumed:
    """Put what was read into the objects of this worker; see `load`."""
    path = Path(header.path)
    saved = msgspec.convert(header.state["identity"], Identity)
    if saved != identity:
        mine, its_own = _differing(identity, saved), _differing(saved, identity)
        raise CheckpointError(
            f"wanted to continue with {mine}, got a checkpoint of {its_own} in {path}; use the same "
            "arguments, task and data with --resume, or another run directory"
        )
    if "made" in header.state:  # those of earlier releases have none
        check_same(trained.made, msgspec.convert(header.state["made"], AsMade), path)
    model = restore(header.state["model"], tensors)
    check_dtypes(trained.model, model, path)
    trained.model.load_state_dict(model)
    parameters = parameters_of(trained.optimizer)
    optimizer = in_form_of(trained.optimizer, restore(header.state["optimizer"], tensors))
    trained.optimizer.load_state_dict(like_parameters(optimizer, parameters))
    scheduled = None
    if "scheduler" in header.state:
        scheduled = restore(header.state["scheduler"], tensors)
    planned = header.state.get("total_steps", trained.total_steps)
    schedule.load(
        trained.scheduler, scheduled, steps=trained.total_steps, planned=planned, path=path
    )
    course = msgspec.convert(header.state["course"], Course, strict=False)
    _check_position(course.position, header.position, path)
    own = tensors.get(f"random.{world.rank}")
    if own is not None:
        random_state.apply(own.numpy().tobytes(), world)
    else:  # the checkpoint is of fewer workers
        random_state.seed_worker(identity.seed, world.rank, step=course.position.step)
    trees = header.state.get("own")  # of workers that trained alone between two exchanges
    is_apart = trains_apart(plan.sync)
    if is_apart != (trees is not None):
        # What was left out of parameters is nothing that a gradient lacks.
        return Resumed(course, found, {}, None, {}, ())
    same_workers = f"random.{world.size - 1}" in tensors and f"random.{world.size}" not in tensors
    if not same_workers:
        # Workers that train alone all continue from the first one's parameters, as from new ones.
        return Resumed(course, found, {} if is_apart else shared_out(tensors), None, {}, ())
    # Of another plan, gradients may come in another order, which its first step measures.
    is_same_plan = header.state["plan"] == msgspec.json.decode(msgspec.json.encode(plan.settings))
    return Resumed(
        course,
        found,
        of_worker(tensors, world.rank),
        None if trees is None else trees[world.rank],
        of_worker(tensors, world.rank, OWN),
        tuple(header.state.get("order", ())) if is_same_plan else (),
    )


def _check_position(
    mine: checkpoint.Position, listed: checkpoint.Position | None, path: Path
) -> None:
    """See that both files say where the run continues alike: checksums are right for what was sealed anew.

    Raises:
        CheckpointError: they do not, so that one is of another checkpoint.
    """
    if mine == listed:
        return
    raise CheckpointError(
        f"wanted a state of the position that its manifest names, {listed}, got one of {mine} in {path}; put "
        "the file back that was written with it, or remove this checkpoint: --resume continues from the one "
        "before"
    )


def _differing(one: Identity, other: Identity) -> str:
    """What one run has and the other has not, for messages."""
    said = {
        "task": f"task {one.task}",
        "batch_size": f"batch size {one.batch_size}",
        "seed": f"seed {one.seed}",
        "num_samples": f"{one.num_samples} training samples",
    }
    return ", ".join(said[name] for name in said if getattr(one, name) != getattr(other, name))


def model_state(path: Path) -> dict[str, Any]:
    """The model's state dict in a checkpoint.

    Raises:
        CheckpointError: it is damaged.
    """
    _, model, _, state = checkpoint.read(path)
    result: dict[str, Any] = restore(state["model"], _prefixed(model))
    return result


def _share(
    directory: Path, world: World
) -> tuple[_Header, dict[str, Tensor], resuming.Found | None]:
    """What rank 0 found and read, on every worker."""
    header, tensors, found = _Header(), None, None
    if world.rank == 0:
        try:
            found = resuming.find(directory)
            if found is not None:
                model, training, state = checkpoint.content(found.path)
                tensors = {**_prefixed(model), **training}
                specs = {
                    name: (list(t.shape), str(t.dtype).removeprefix("torch."))
                    for name, t in tensors.items()
                }
                header = _Header(
                    path=str(found.path), position=found.position, state=state, specs=specs
                )
        except CheckpointError as error:
            # Sent instead of raised: the others wait in the broadcast below.
            header = _Header(error=str(error))
    header = msgspec.json.decode(share_bytes(msgspec.json.encode(header), world), type=_Header)
    if header.error:
        raise CheckpointError(header.error)
    return header, share_tensors(tensors, header.specs, world), found


def _prefixed(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{MODEL}{name}": tensor for name, tensor in model.items()}
