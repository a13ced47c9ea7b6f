"""Execution modes: what runs the batches of a step, by its plan."""

from typing import Any, ClassVar, Protocol

from torch import Tensor

from ridgeline.execution import MODES
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.checked import CheckedRunner
from ridgeline.workers.world import World


class Runner(Protocol):
    """An execution mode: runs batches, and is closed once.

    Attributes:
        places: Whether it brings batches to the device itself, where they are not there already.
    """

    places: ClassVar[bool]

    def __call__(self, batch: Any) -> Tensor:
        """One step; the detached loss."""
        ...

    def close(self) -> None:
        """Release what is held."""


class EagerRunner:
    """Runs the body operator by operator."""

    places: ClassVar[bool] = False

    def __init__(self, body: StepBody, recorder: Recorder) -> None:
        self._body = body
        self._recorder = recorder

    def __call__(self, batch: Any) -> Tensor:
        """One step."""
        return self._body(batch, self._recorder)

    def close(self) -> None:
        """Nothing is held."""


def make_runner(body: StepBody, recorder: Recorder, world: World, notes: list[str]) -> Runner:
    """The execution mode of a plan.

    Args:
        body: The step, with its plan.
        recorder: Notified of its frames.
        world: This worker's place.
        notes: Receives what was done differently, and why.

    Raises:
        PlanError: the mode has no room for several workers.
    """
    mode = MODES[body.plan.execution]
    if mode.form in ("step-graph", "packaged"):
        from ridgeline.runtime.steps.whole_step.runner import StepGraphRunner

        return StepGraphRunner(body, recorder, world, notes, packaged=mode.form == "packaged")
    if mode.is_replayed:
        from ridgeline.runtime.steps.graphs.graph import GraphRunner

        return GraphRunner(body, recorder, world, notes)
    if mode.is_compiled or mode.replays_model:
        return CheckedRunner(body, recorder, world, notes)
    return EagerRunner(body, recorder)
