"""The whole step as one CUDA graph: forward, loss, backward, all-reduces and optimizer.

An optimizer that no graph can hold (its learning rate is a Python number, it counts on the host) steps after
each replay instead, while the graph still runs.

The first calls run eagerly on the capture stream: they are real steps, and they warm up libraries,
communicators, compiled blocks and the bucket order. Then one call captures, checks the replay against
the eager step from the same state, and from there on a step costs the host one launch.
"""

import gc
import time
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.execution import MODES
from ridgeline.optimizer_forms import fits_graph
from ridgeline.runtime import batch as batches
from ridgeline.runtime.batch_pattern import BatchPattern
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.capturable import LearningRates, make_capturable
from ridgeline.runtime.capture_watch import CaptureWatch
from ridgeline.runtime.capturing import capturing, on_stream
from ridgeline.runtime.clearance import check_gradient_hooks, clear_for_capture
from ridgeline.runtime.clocks import BranchClock, Clock, DeviceClock, HostClock
from ridgeline.runtime.copies import copy_into
from ridgeline.runtime.equivalence import check_replay
from ridgeline.runtime.hybrid.guards.layouts import refused_unread
from ridgeline.runtime.hybrid.steps.reads import StepReads
from ridgeline.runtime.recorder import Recorder, StepRecord, step_spans
from ridgeline.runtime.step_hooks import step_hooks
from ridgeline.runtime.usual_shapes import UsualShapes
from ridgeline.runtime.world import World
from ridgeline.timeline import Span

EAGER_STEPS = 3
"""Real steps before the capture: NCCL, cuDNN and the allocator settle, buckets are cut again."""
OTHER_SHAPES = "batches of other shapes than the captured one ran without a graph"
OTHER_LAYOUTS = "batches that the code takes otherwise because of their strides ran without a graph"
WITH_GRADIENTS = "batches that want gradients themselves ran without a graph"
SHORT_NS = 500_000
"""A replay shorter than this is captured without stamps, each of which costs it about 2 us; see `clocks`."""
_requires_grad = attrgetter("requires_grad")


class CapturedStep:
    """One captured step: the graph, the tensors it reads the batch from, and its loss.

    Args:
        body: The step.
        batch: An example; its tensors are copied.
        stream: Captured on it.
        pool: Memory shared with other captures of the same step; None for its own.
        has_stamps: Whether the graph records when its frames begin.
        has_optimizer: Whether the optimizer is part of the graph; else it steps after each replay.

    Raises:
        CaptureError: something in the step cannot be captured.
    """

    def __init__(
        self,
        body: StepBody,
        batch: Any,
        stream: torch.cuda.Stream,
        pool: Any,
        *,
        has_stamps: bool = True,
        has_optimizer: bool = True,
    ) -> None:
        flat, structure = pytree.tree_flatten(batch)
        self.strides = [_strides(leaf) for leaf in flat if isinstance(leaf, Tensor)]
        self.inputs = [leaf.clone() for leaf in flat if isinstance(leaf, Tensor)]
        static = iter(self.inputs)
        self.batch = pytree.tree_unflatten(
            [next(static) if isinstance(leaf, Tensor) else leaf for leaf in flat], structure
        )
        body.optimizer.zero_grad(set_to_none=True)
        self.has_stamps = has_stamps
        self._outside = None if has_optimizer else body.optimizer
        clock: Clock = HostClock()
        if has_stamps:
            clock = DeviceClock(external=True) if body.reducer is None else BranchClock()
        recorder = Recorder(clock, starts=False)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, "the step", stream=stream, pool=pool):
            recorder.current = StepRecord(clock.stamp())
            self._loss = (body if has_optimizer else body.gradients)(self.batch, recorder)
            # An event that the graph records must live as long as the graph does.
            if has_optimizer:
                recorder.current.end = clock.stamp()
            if isinstance(clock, DeviceClock):
                clock.join()
        self.pattern = BatchPattern(self.batch)
        held = {p for group in body.optimizer.param_groups for p in group["params"]}
        parameters = dict.fromkeys((*body.model.parameters(), *held))
        self._gradients = [(p, p.grad) for p in parameters]
        # No step clears these: the graph adds to them.
        self._added_to = [(p, g) for p, g in self._gradients if p not in held and g is not None]
        self._record = recorder.current
        if not has_optimizer:
            self._record.end = torch.cuda.Event(enable_timing=True)  # behind the optimizer, outside
        self._clock = DeviceClock()

    def load(self, tensors: list[Tensor]) -> None:
        """Copy the tensors of a batch to where the graph reads them."""
        copy_into(self.inputs, tensors)

    def show_gradients(self) -> None:
        """Make the parameters' gradients those that replays compute."""
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def replay(self) -> Tensor:
        """Run the step; its loss, which the next replay overwrites."""
        for parameter, gradient in self._added_to:
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
        self.graph.replay()
        self.show_gradients()  # whoever dropped them would have an optimizer outside do nothing
        if self._outside is not None:
            self._outside.step()
            if self.has_stamps:
                self._record.end.record()  # type: ignore[union-attr]
        return self._loss

    def frames(self) -> tuple[Span, ...]:
        """The frames of the last replay of a graph that has stamps.

        Cost: Waits for the device.
        """
        return step_spans(self._record, self._clock)

    def close(self) -> None:
        """Drop the graph, whoever still refers to this step (the traceback of a failed check does)."""
        self.graph.reset()


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
        self._captured: dict[batches.Signature, CapturedStep] = {}
        self._shapes = UsualShapes()
        self._num_eager = 0
        self._prepare_ns = 0
        self._last: CapturedStep | None = None
        self._num_replays = 0
        self._reads: StepReads | None = None
        self._watch: CaptureWatch | None = None
        self._make_capturable()

    def __call__(self, batch: Any) -> Tensor:
        """One step, eager, capturing or replayed.

        Raises:
            CaptureError: the step cannot be captured.
            EquivalenceError: its replay differs from the eager step.
        """
        begin = time.perf_counter_ns()
        if self._rates.num_groups != len(self._body.optimizer.param_groups):
            self._make_capturable()
        self._rates.refresh()
        if self._captured:
            self._forget_if_changed()
        elif self._world.size == 1 and not self._shapes.is_usual(batch):
            self._count_as_written()
            return self._run_as_written(batch)
        else:
            self._wait_if_changed()
        if self._num_eager < EAGER_STEPS:
            if self._num_eager == 0:
                clear_for_capture(self._body, batch, self._world, self._notes)
            self._num_eager += 1
            cleared = time.perf_counter_ns()
            loss = self._run_eagerly(batch)
            if self._num_eager == EAGER_STEPS:
                self._watch = CaptureWatch(self._body, has_optimizer=self._has_optimizer)
            # Where nothing is compiled in them, these are steps as every run begins with.
            is_compiled = MODES[self._body.plan.execution].is_compiled
            self._prepare_ns += (time.perf_counter_ns() if is_compiled else cleared) - begin
            return loss
        step, tensors = self._last, None
        if step is not None:
            tensors = step.pattern.tensors(batch)
            if tensors is not None and any(map(_requires_grad, tensors)):
                tensors = None
        if step is None or tensors is None:
            step = self._step_for(batch, begin)
            begin = time.perf_counter_ns()  # a capture happens once; it is no cost of a step
            if step is None:
                return self._run_as_written(batch)
            self._last = step
            tensors = [leaf for leaf in batches.leaves(batch) if isinstance(leaf, Tensor)]
        if [*map(_strides, tensors)] != step.strides and not self._bears_layout(batch):
            self._count_as_written(OTHER_LAYOUTS)
            return self._run_as_written(batch)
        step.load(tensors)
        self._body.overhead_ns = time.perf_counter_ns() - begin
        # The host issues a replay while another runs.
        self._recorder.counts["hidden_overhead"] = 1.0
        loss = step.replay()
        self._num_replays += 1
        # After 1, 2, 4, 8, ... replays: ever more rarely.
        if step.has_stamps and self._num_replays & (self._num_replays - 1) == 0:
            self._recorder.add_frames(step.frames())
        return loss.clone()

    def _step_for(self, batch: Any, begin: int) -> CapturedStep | None:
        """The captured step for a batch, made where there is none; None where it is better run eagerly."""
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in batches.leaves(batch)):
            self._count_as_written(WITH_GRADIENTS)
            return None
        signature = batches.signature(batch)
        step = self._captured.get(signature)
        if step is None:
            step = self._capture(signature, batch)
            self._prepare_ns += time.perf_counter_ns() - begin
            self._recorder.counts["compile_s"] = self._prepare_ns * 1e-9
        return step

    def close(self, *, wait: bool = True) -> None:
        """Drop the graphs; they must be gone before the process group whose collectives they hold.

        Args:
            wait: For the device before; without, a replay that still runs gives its memory back too early.

        Cost: Waits for the device.
        """
        if wait:
            torch.cuda.synchronize()
        for step in self._captured.values():
            step.close()
        self._captured.clear()
        self._last = None
        gc.collect()

    def _run_eagerly(self, batch: Any) -> Tensor:
        self._last = None
        with on_stream(self._stream):
            return self._body(batch, self._recorder)

    def _run_as_written(self, batch: Any) -> Tensor:
        """A batch without a graph: what compiles would compile for each shape anew.

        Several workers send their gradients as the others do.
        """
        if self._world.size > 1:
            return self._run_eagerly(batch)
        with self._body.as_written():
            return self._run_eagerly(batch)

    def _bears_layout(self, batch: Any) -> bool:
        """Whether the step computes the same with a batch that lies otherwise in memory.

        Several workers, whose batches may differ in that, go on together.
        """
        return self._world.size > 1 or self._reads is None or self._reads.serves(batch)

    def _count_as_written(self, why: str = OTHER_SHAPES) -> None:
        self._recorder.count("eager_steps")
        if why not in self._notes:
            self._notes.append(why)

    def _fits_graph(self) -> bool:
        """Whether the optimizer steps inside of the graph; around its step, hooks run in Python."""
        optimizer = self._body.optimizer
        return fits_graph(optimizer, self._body.model) and not any(step_hooks(optimizer))

    def _make_capturable(self) -> None:
        optimizer = self._body.optimizer
        self._has_optimizer = self._fits_graph()
        if self._has_optimizer:
            changes = make_capturable(optimizer, self._world.device)
        else:
            name = type(optimizer).__name__
            changes = (f"the optimizer {name} steps outside of the graph: no graph can hold it",)
        self._notes.extend(change for change in changes if change not in self._notes)
        self._rates = LearningRates(self._body.optimizer)

    def _wait_if_changed(self) -> str | None:
        """What is another since the last eager step or capture; an eager step then comes before the next.

        A graph that makes optimizer state or gradients which that needs makes them in every replay.
        """
        if self._watch is None or (why := self._watch.changed()) is None:
            return None
        if self._watch.has_other_settings() or self._fits_graph() != self._has_optimizer:
            self._make_capturable()  # settings that were loaded or added are as the user has them
        self._num_eager = EAGER_STEPS - 1
        return why

    def _forget_if_changed(self) -> None:
        """Drop the graphs where they are no longer the user's step."""
        if self._watch is None or self._reads is None:
            return  # it is being captured
        why = self._wait_if_changed() or self._reads.broken()
        if why is None:
            return
        self._num_eager = EAGER_STEPS - 1
        self._recorder.count("recaptures")
        note = f"captured again because {why}"
        if note not in self._notes:
            self._notes.append(note)
        self.close()

    def _capture(self, signature: batches.Signature, batch: Any) -> CapturedStep | None:
        """A capture for this shape, or None where it is better run eagerly, which is counted."""
        if self._captured:
            is_repeated = self._shapes.is_worth_another(signature, len(self._captured))
            if self._world.size > 1 or not is_repeated:
                self._count_as_written()
                return None
        pool = next(iter(self._captured.values())).graph.pool() if self._captured else None
        World.close_before_leaving(self)
        check_gradient_hooks(self._body)  # some may have come since the first call
        step = self._checked(signature, batch, pool, has_stamps=True)
        if self._world.size == 1:
            frames = step.frames()
            if max((span.end_ns for span in frames), default=SHORT_NS) < SHORT_NS:
                step.close()
                step = self._checked(signature, batch, pool, has_stamps=False)
                self._recorder.add_frames(frames)
        self._recorder.counts["shapes"] = float(len(self._captured))
        if len(self._captured) == 1:
            self._read(step)
        # Each check leaves the optimizer's state in other dictionaries.
        self._watch = CaptureWatch(self._body, has_optimizer=self._has_optimizer)
        return step

    def _read(self, step: CapturedStep) -> None:
        """Find what the code of the first captured step takes for granted.

        Raises:
            CaptureError: nobody can read its code, so that changes of what that reads would go unnoticed.
        """
        try:
            kind = self._world.device.type
            self._reads = refused_unread(StepReads, self._body, step.batch, kind, is_lifted=False)
        except RidgelineError:
            self.close()
            raise

    def _checked(
        self, signature: batches.Signature, batch: Any, pool: Any, *, has_stamps: bool
    ) -> CapturedStep:
        """A capture that was found to equal the eager step."""
        try:
            step = CapturedStep(
                self._body,
                batch,
                self._stream,
                pool,
                has_stamps=has_stamps,
                has_optimizer=self._has_optimizer,
            )
        except CaptureError as error:
            World.abandon(str(error))
            raise
        self._captured[signature] = step
        try:
            check_replay(
                self._body,
                step.batch,
                step.inputs,
                self._rates,
                step.replay,
                world=self._world,
                notes=self._notes if has_stamps else [],  # the first check has said it
                stream=self._stream,
            )
        except RidgelineError:
            self.close()
            raise
        return step


def _strides(tensor: Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()
