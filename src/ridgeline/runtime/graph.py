"""The whole step as one CUDA graph: forward, loss, backward, all-reduces and optimizer.

The first calls run eagerly on the capture stream: they are real steps, and they warm up libraries,
communicators and the bucket order. Then one call captures, checks the replay against the eager step
from the same state, and from there on a step costs the host one launch.
"""

import gc
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import PlanError, RidgelineError
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.capturable import LearningRates, make_capturable, settings_of
from ridgeline.runtime.equivalence import check_replay
from ridgeline.runtime.recorder import DeviceClock, Recorder, StepRecord, step_spans
from ridgeline.runtime.world import World

EAGER_STEPS = 3
"""Real steps before the capture: NCCL, cuDNN and the allocator settle, buckets are cut again."""


class GraphRunner:
    """Runs a step body as a replayed CUDA graph.

    Args:
        body: The step.
        recorder: Told of the steps; frames inside a replay come from events captured with it.
        world: For the check, which all workers make together.
        notes: Receives what was changed or done differently, and why.
    """

    def __init__(self, body: StepBody, recorder: Recorder, world: World, notes: list[str]) -> None:
        self._body = body
        self._recorder = recorder
        self._world = world
        self._notes = notes
        self._stream = torch.cuda.Stream()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_eager = 0
        self._num_replays = 0
        notes.extend(make_capturable(body.optimizer, world.device))
        self._rates = LearningRates(body.optimizer)

    @property
    def is_captured(self) -> bool:
        """Whether there is a graph, so that batches must fit its shapes."""
        return self._graph is not None

    def __call__(self, batch: Any) -> Tensor:
        """One step, eager, capturing or replayed.

        Raises:
            PlanError: the step cannot be captured, or its replay differs from the eager step.
        """
        begin = time.perf_counter_ns()
        self._rates.refresh()
        if self._num_eager < EAGER_STEPS:
            self._num_eager += 1
            return self._run_eagerly(batch)
        if self._graph is None or self._guards() != self._captured_guards:
            self._capture(batch)
            begin = time.perf_counter_ns()  # a capture happens once; it is no cost of a step
        self._load(batch)
        self._body.overhead_ns = time.perf_counter_ns() - begin
        self._recorder.counts["hidden_overhead"] = (
            1.0  # the host issues a replay while another runs
        )
        self._replay()
        self._num_replays += 1
        if self._num_replays & (self._num_replays - 1) == 0:  # 1, 2, 4, 8, ...: ever more rarely
            self._recorder.add_frames(step_spans(self._captured, DeviceClock()))
        return self._loss.clone()

    def close(self) -> None:
        """Drop the graph; it must be gone before the process group whose collectives it holds.

        Cost: Waits for the device.
        """
        torch.cuda.synchronize()
        self._graph = None
        gc.collect()

    def _run_eagerly(self, batch: Any) -> Tensor:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self._body(batch, self._recorder)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss

    def _guards(self) -> tuple[Any, ...]:
        return settings_of(self._body.optimizer), self._body.model.training

    def _capture(self, batch: Any) -> None:
        if self._graph is not None:
            self._recorder.count("recaptures")
            note = "captured again because an optimizer setting or the training flag changed"
            if note not in self._notes:
                self._notes.append(note)
            self.close()
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        self._inputs = [leaf.clone() for leaf in leaves]
        static = iter(self._inputs)
        flat, structure = pytree.tree_flatten(batch)
        self._static_batch = pytree.tree_unflatten(
            [next(static) if isinstance(leaf, Tensor) else leaf for leaf in flat], structure
        )
        self._captured_guards = self._guards()
        self._body.optimizer.zero_grad(set_to_none=True)
        recorder = Recorder(DeviceClock(external=True), starts=False)
        graph = torch.cuda.CUDAGraph()
        try:
            # Threads that pin memory or watch NCCL go on calling CUDA meanwhile; that is allowed.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                recorder.current = StepRecord(recorder.clock.stamp())
                self._loss = self._body(self._static_batch, recorder)
                recorder.current.end = recorder.clock.stamp()
        except RidgelineError:
            raise
        except RuntimeError as error:
            raise PlanError(
                f"wanted to capture the step as a CUDA graph, got {type(error).__name__}: {error}; the "
                "process cannot go on after a failed capture, start it again with execution='eager'"
            ) from error
        self._graph = graph
        self._captured = recorder.current
        check_replay(
            self._body, self._recorder, self._static_batch, self._inputs, self._rates, self._replay,
            lambda: self._loss, self._stream, self._notes,
        )  # fmt: skip

    def _load(self, batch: Any) -> None:
        leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        torch._foreach_copy_(self._inputs, leaves)

    def _replay(self) -> None:
        assert self._graph is not None
        self._graph.replay()
