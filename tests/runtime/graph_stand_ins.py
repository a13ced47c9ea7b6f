"""A capture that records nothing, so that what a graph runner does can be seen without a GPU."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs import graph
from ridgeline.runtime.steps.graphs.captured_step import CapturedStep
from ridgeline.runtime.steps.graphs.clearance import Clearance
from ridgeline.runtime.steps.graphs.graph import GraphRunner
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.copies import repeats
from ridgeline.tensors.usual_batch import BatchReader, usual_batch
from ridgeline.timeline import Span


class Stream:
    """Orders nothing: all runs in the calling thread."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""


class Gradients:
    """They are the parameters' own."""

    copies = False

    def are_alone(self) -> bool:
        """Nobody else has any."""
        return True

    def are_kept(self) -> bool:
        """A replay writes over none."""
        return False

    def watch(self) -> None:
        """There is nothing to see."""


class Captured:
    """Stands for a graph: a replay runs the body; `log` tells what was done."""

    log: list[str] = []
    usual: BatchReader | None = None
    is_apart = frozenset[int]().isdisjoint
    dropout = DropoutStates(())
    replay_ns = 10**9
    gradients = Gradients()
    bears_layout: Any = CapturedStep.bears_layout

    def __init__(
        self,
        body: StepBody,
        batch: Any,
        stream: Any,
        pool: Any,
        *,
        has_stamps: bool,
        has_optimizer: bool,
        idle_draws: object,
        copies_gradients: bool,
    ) -> None:
        assert not copies_gradients
        name = "capture" if has_stamps else "capture without stamps"
        self.log.append(name if has_optimizer else f"{name} without optimizer")
        self.body, self.batch, self.inputs = body, batch, []
        tensors = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        self.written: list[int] = []
        self._strides, self._repeats = [tensor.stride() for tensor in tensors], repeats(tensors)
        self.graph, self.has_stamps, self.pattern = self, has_stamps, BatchPattern(batch)

    def pool(self) -> None:
        """Of no use."""

    def load(self, tensors: list[Tensor]) -> None:
        rest = iter(tensors)
        self.batch = pytree.tree_map_only(Tensor, lambda _: next(rest), self.batch)

    def expect(self, batch: Any, tensors: list[Tensor]) -> None:
        self.usual = usual_batch(batch, tensors)

    def replay(self, *, are_shown: bool = False) -> Tensor:
        self.log.append("replay")
        return self.body(self.batch, Recorder(HostClock()))

    def frames(self) -> tuple[Span, ...]:
        assert self.has_stamps
        return (Span(name="forward", lane="compute", start_ns=0, end_ns=self.replay_ns),)

    def close(self) -> None:
        self.log.append("close")


def install(setattr: Callable[[Any, str, Any], None], log: list[str]) -> None:
    """Put the stand-ins in place.

    Args:
        setattr: The built-in one, or that of a `MonkeyPatch`.
        log: Told what runners do; `eager` for a step operator by operator, `synchronize` for a wait.
    """
    for name, stand_in in {
        "Stream": Stream,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: Stream(),
        "synchronize": lambda: log.append("synchronize"),
    }.items():
        setattr(torch.cuda, name, stand_in)
    setattr(Captured, "log", log)
    setattr(graph, "CapturedStep", Captured)
    setattr(graph, "check_replay", lambda *_, **__: None)
    setattr(graph.clearance, "clear_for_capture", lambda *_: Clearance())
    setattr(graph.cleared, "cleared_before", lambda *_: None)
    eagerly = GraphRunner._run_eagerly

    def logged(self: GraphRunner, batch: Any) -> Tensor:
        log.append("eager")
        return eagerly(self, batch)

    setattr(GraphRunner, "_run_eagerly", logged)
