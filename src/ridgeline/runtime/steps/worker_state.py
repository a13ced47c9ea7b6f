"""What one worker alone remembers between two steps, for the checkpoints of a script of the user's own.

This is what codecs left out of gradients, what a rhythm's outer optimizer remembers and what is on its way,
the order of buckets and, where workers train alone between two exchanges, their own model and optimizer.
"""

import abc
import copy
from collections.abc import Mapping
from typing import Any

from ridgeline.closing import Closing
from ridgeline.errors import CheckpointError, PlanError
from ridgeline.runtime.checkpoints.checkpointing import UNSAVED
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.synchronisation import COMPRESSIONS, trains_apart, values_of


class HasWorkerState(Closing):
    """A step whose workers may each save what they alone remember."""

    @abc.abstractmethod
    def _ready(self) -> PlannedStep:
        """The step with its plan."""

    def __reduce__(self) -> Any:
        """Refused: what would be written are hooks, threads and programs of this process.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            f"wanted something to copy or pickle, got a {type(self).__name__}, which trains the model that "
            "it was made of; copy or save that model's state_dict() and step.optimizer_state(), and make "
            "another step there"
        )

    def worker_state(self) -> dict[str, Any]:
        """What this worker alone remembers between two steps; all workers call this, and each saves its own.

        With the model's `state_dict()` and `optimizer_state()`, which are of all workers, training continues
        to the bit: what a compression left out of gradients and what DiLoCo's outer optimizer remembers is in
        here. Plain containers of tensors on the CPU, for `torch.save`.

        Raises:
            PlanError: no plan is in force yet.

        Cost: A copy of what is remembered, and where workers train alone (`every` above 1) of the model and
            the optimizer's state. Waits for what is on its way.
        """
        return worker_state(self._ready())

    def load_worker_state(self, state: Mapping[str, Any]) -> None:
        """Continue from the `worker_state()` of the worker of this rank, before the first step.

        Load the model before the step is made, and the optimizer before or behind it; then this. With
        `plan="auto"` call `prepare(batch)` first.

        Raises:
            CheckpointError: it is of another rank, number of workers, compression, rhythm or model, or not
                whole; or steps were trained already.
            PlanError: no plan is in force yet.
        """
        load_worker_state(self._ready(), state)


def worker_state(step: PlannedStep) -> dict[str, Any]:
    """See `HasWorkerState`."""
    found = _facts(step)
    synchronizer = step.synchronizer
    if synchronizer is None:
        return found
    remembered = synchronizer.state_dict()
    found["remembered"] = {
        name: tensor.detach().cpu().clone()
        for name, tensor in remembered.items()
        if not name.startswith(UNSAVED)
    }
    found["order"] = list(synchronizer.order())
    if synchronizer.trains_apart:
        found["model"] = copy.deepcopy(step.model.state_dict())
        found["optimizer"] = copy.deepcopy(step.optimizer.state_dict())
    return found


def load_worker_state(step: PlannedStep, state: Mapping[str, Any]) -> None:
    """See `HasWorkerState`."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"wanted what worker_state() returned, got {type(state).__name__}; load that of the same rank, "
            "or leave it out"
        )
    for name, mine in _facts(step).items():
        if state.get(name) != mine:
            raise CheckpointError(
                f"wanted the worker_state() of a worker with {name}={mine!r}, as the step has it, got "
                f"{name}={state.get(name)!r}; load that of the same rank into a step of the same plan, or "
                "leave it out: what was not sent of gradients is lost then, and a rhythm begins anew"
            )
    if step.num_steps:
        raise CheckpointError(
            f"wanted a step that has not trained yet, got one after {step.num_steps} steps; load the "
            "worker_state() before the first of them"
        )
    synchronizer = step.synchronizer
    if synchronizer is None:
        return
    _check_fits(step, state, is_apart=synchronizer.trains_apart)
    if synchronizer.trains_apart:  # the step has given all workers what the first one has
        step.model.load_state_dict(state["model"])
        step.optimizer.load_state_dict(state["optimizer"])
    if state["order"]:
        synchronizer.take_order(state["order"])
    synchronizer.load_state_dict(state["remembered"])


def _check_fits(step: PlannedStep, state: Mapping[str, Any], *, is_apart: bool) -> None:
    """See that a state has all its parts, and is of this model: what no parameter has would be dropped."""
    parts = ("remembered", "order", *(("model", "optimizer") if is_apart else ()))
    if missing := [part for part in parts if part not in state]:
        raise CheckpointError(
            f"wanted a whole worker_state(), got one without {missing[0]!r}; load it as worker_state() "
            "returned it, or leave it out"
        )
    known = {name for name, _ in step.model.named_parameters()}
    # By parameter, behind the kind of what is remembered; what is of none has no dot in its name.
    named = [name.partition(".")[2] for name in state["remembered"]]
    for name in (*filter(None, named), *state["order"]):
        if name not in known:
            raise CheckpointError(
                "wanted the worker_state() of a worker that trains this model, got one that remembers "
                f"{name}, which is no parameter of {type(step.model).__name__}; load it into a step of the "
                "model that it was saved with, or leave it out"
            )


def _facts(step: PlannedStep) -> dict[str, Any]:
    """What must be the same in a step that continues."""
    sync, world = step.plan.sync, step.world
    remembers = COMPRESSIONS[sync.compression].encodes or trains_apart(sync)
    return {
        "workers": world.size,
        "rank": world.rank,
        "compression": sync.compression,
        "every": sync.every,
        # By these a rhythm, or a codec, remembers other things; others say only how the mean is made.
        "options": values_of(sync) if remembers else {},
    }
