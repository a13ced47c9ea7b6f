"""The whole step as one CUDA graph: forward, loss, backward, all-reduces and optimizer.

An optimizer that no graph can hold (its learning rate is a Python number, it counts on the host) steps after
each replay instead, while the graph still runs.

The first calls run eagerly on the capture stream: they are real steps that warm up libraries, communicators,
compiled blocks and the bucket order. What is compiled is checked before. Then one call captures, checks the
replay against the eager step from the same state, and from there on a step costs the host one launch.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ridgeline.capture.capturing import on_stream, watched
from ridgeline.capture.dropout_states import SEEDED, left_as_found
from ridgeline.capture.mask_looks import sparing
from ridgeline.capture.unloadable import cannot_be_loaded, why_not_loaded
from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.execution import MODES
from ridgeline.guards.layouts import refused_unread
from ridgeline.optimizers.shared_memory import address_of, memory_of
from ridgeline.reach.renewals import letting_go
from ridgeline.reach.undo import Undo
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.body.capture_watch import CaptureWatch
from ridgeline.runtime.steps.body.graph_optimizer import GraphOptimizer
from ridgeline.runtime.steps.checks import failed_attempts
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.perturbed_runs import ONE_SHIFT, SHIFTS
from ridgeline.runtime.steps.graphs import clearance, cleared
from ridgeline.runtime.steps.graphs.captured_step import OF_BATCHES, CapturedStep
from ridgeline.runtime.steps.graphs.checked import check_compiled
from ridgeline.runtime.steps.graphs.graph_gradients import COPIED, leave_kept
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.tensors import batch as batches
from ridgeline.tensors.nests import tensors_in
from ridgeline.tensors.usual_shapes import OTHER_LAYOUTS, OTHER_SHAPES, UsualShapes
from ridgeline.workers import leaving
from ridgeline.workers.world import World

EAGER_STEPS = 3
"""Real steps before the capture: NCCL, cuDNN and the allocator settle, buckets are cut again."""
SHORT_NS = 500_000
"""A replay shorter than this is captured without stamps, each of which costs it about 2 us; see `clocks`."""


class GraphRunner:
    """Runs a step body as a replayed CUDA graph.

    Args:
        body: The step.
        recorder: Notified of the steps; frames inside a replay come from events captured with it.
        world: For the check, which all workers make together.
        notes: Receives what was changed or done differently, and why.
    """

    places: ClassVar[bool] = True

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
        self._let_go: Callable[[], None] | None = None
        self._clearance = clearance.Clearance()
        self._is_compared = self._has_waited = self._copies_gradients = False
        self._optimizer = GraphOptimizer(body, world.device, notes)

    def __call__(self, batch: Any) -> Tensor:
        """One step, eager, capturing or replayed.

        Raises:
            CaptureError: the step cannot be captured.
            EquivalenceError: its replay differs from the eager step.
        """
        begin = self._recorder.begun_ns
        step = self._last
        if step is not None and step.usual is not None and self._is_unchanged():
            are_alone = step.gradients.are_alone()
            if are_alone or not step.gradients.are_kept():
                if (tensors := step.usual(batch)) is None:  # they do not lie on the device
                    batch = self._body.placed(batch)
                    tensors = step.usual(batch)
                if tensors is not None:
                    return self._replay(step, tensors, begin, batch, are_shown=are_alone)
        batch = self._body.placed(batch)
        with sparing():
            return self._run_with_a_look(batch, begin)

    def _run_with_a_look(self, batch: Any, begin: int) -> Tensor:
        """A step that may be another than the last one."""
        if why := watched():
            self._count_as_written(why)
            return self._run_as_written(batch)
        self._optimizer.refresh()
        if self._captured:
            self._forget_if_changed()
        elif self._world.size == 1 and not self._shapes.is_usual(batch):
            self._count_as_written(self._shapes.why_other(batch, OTHER_SHAPES))
            return self._run_as_written(batch)
        else:
            self._step_eagerly_if_changed()
        if self._num_eager < EAGER_STEPS:
            return self._warm_up(batch, begin)
        step = self._last
        tensors = None if step is None else step.pattern.tensors(batch)
        tensors = None if any(map(cannot_be_loaded, tensors or ())) else tensors
        if step is None or tensors is None:
            step = self._step_for(batch, begin)
            begin = time.perf_counter_ns()  # a capture happens once; it is no cost of a step
            if step is None:
                return self._run_as_written(batch)
            self._last = step
            tensors = tensors_in(batch)
        if not step.bears_layout(batch, tensors, self._reads, self._world.size):
            self._count_as_written(OTHER_LAYOUTS)
            return self._run_as_written(batch)
        if self._watch is not None and not self._watch.holds():
            self._watch.settle()
        self._recorder.counts["hidden_overhead"] = 1.0  # it issues a replay while another runs
        step.expect(batch, tensors)
        return self._replay(step, tensors, begin, batch)

    def _is_unchanged(self) -> bool:
        """Whether all but batch and gradients is as it was; False where that takes a closer look."""
        watch, reads = self._watch, self._reads
        return watch is not None and reads is not None and watch.holds() and reads.still_hold()

    def _replay(
        self,
        step: CapturedStep,
        tensors: Sequence[Tensor],
        begin: int,
        batch: Any,
        *,
        are_shown: bool = False,
    ) -> Tensor:
        if step.dropout.held and step.dropout.are_seeded():
            self._count_as_written(SEEDED)
            loss = self._run_as_written(batch)
            step.dropout.adopt()
            return loss
        is_apart = not step.written and step.is_apart(map(address_of, map(memory_of, tensors)))
        if not is_apart and step.mixes(tensors):
            self._count_as_written(OF_BATCHES)
            return self._run_as_written(batch)
        step.load(tensors)
        self._body.overhead_ns = time.perf_counter_ns() - begin
        loss = step.replay(are_shown=are_shown)
        if step.written:
            step.give_back(tensors)
        self._num_replays += 1  # frames are read after 1, 2, 4, 8, ... of them
        if step.has_stamps and self._num_replays & (self._num_replays - 1) == 0:
            self._recorder.add_frames(step.frames())
        return loss.clone()

    def _warm_up(self, batch: Any, begin: int) -> Tensor:
        """One of the steps before the capture, and before the first all that must be known for it."""
        before = known = None
        if self._num_eager == 0:
            if self._optimizer.is_inside:
                known = cleared.cleared_before(self._body, batch, self._world)
            if known is None and not self._has_waited:
                self._has_waited = True
                if cleared.may_hold_later(self._body, batch, self._world):
                    return self._run_as_written(batch)
            with left_as_found(self._body.model, self._body.loss_fn):
                self._clear(batch, known)
            before = Undo(self._body.model, self._body.loss_fn, values=False)
        elif self._let_go is not None:
            self._let_go()
            self._let_go = None
        self._num_eager += 1
        looked = time.perf_counter_ns()
        loss = self._run_as_captured(batch)
        self._let_go = None if before is None else letting_go(before)
        if self._num_eager == EAGER_STEPS:
            self._watch = CaptureWatch(self._body, has_optimizer=self._optimizer.is_inside)
        # Where nothing is compiled in them, these are steps as every run begins with.
        is_compiled = MODES[self._body.plan.execution].is_compiled
        self._prepare_ns += (time.perf_counter_ns() if is_compiled else looked) - begin
        return loss

    def _step_for(self, batch: Any, begin: int) -> CapturedStep | None:
        """The captured step for a batch, made where there is none; None where it is better run eagerly."""
        tensors = tensors_in(batch)
        if why := why_not_loaded(tensors):
            self._count_as_written(why)
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

    def _run_as_captured(self, batch: Any) -> Tensor:
        """A batch without a graph in the form that is captured, which may have to be compiled."""
        if not MODES[self._body.plan.execution].is_compiled:
            return self._run_eagerly(batch)
        with failed_attempts.refused_if_not_compiled(self._body):
            return self._run_eagerly(batch)

    def _clear(self, batch: Any, known: cleared.Cleared | None) -> None:
        """Find out what must be known before the first step, but for what a trial has found out."""
        clearance.check_gradient_hooks(self._body)
        is_as_earlier = known is None and cleared.cleared_earlier(self._body, batch, self._world)
        if known is not None:
            self._clearance = known.clearance
        elif not is_as_earlier:
            found = clearance.clear_for_capture(self._body, batch, self._world, self._notes)
            self._clearance = found
        is_compiled = MODES[self._body.plan.execution].is_compiled
        # What is captured of code as written is the same for every step that captures it.
        is_checked = known is not None and (known.form is self._body.form or not is_compiled)
        self._is_compared = is_checked or is_as_earlier
        # Of steps that are undone the check of the replay, which covers what is compiled, will do.
        if is_compiled and not (is_checked or self._body.is_undone):
            check_compiled(
                self._body, batch, self._optimizer.rates, self._world, self._notes, self._stream
            )

    def _run_as_written(self, batch: Any) -> Tensor:
        """A batch without a graph: what compiles would compile for each shape again.

        Several workers send their gradients as the others do.
        """
        if self._world.size > 1:
            return self._run_eagerly(batch)
        with self._body.as_written():
            return self._run_eagerly(batch)

    def _count_as_written(self, why: str) -> None:
        self._recorder.count("eager_steps")
        self._note(why)

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _step_eagerly_if_changed(self) -> str | None:
        """What is another since the last eager step or capture; an eager step then comes before the next.

        A graph that makes optimizer state or gradients which that needs makes them in every replay.
        """
        if self._watch is None or (why := self._watch.changed()) is None:
            return None
        if self._watch.has_other_settings() or self._optimizer.is_elsewhere():
            self._optimizer.make_fit()  # settings that were loaded or added are as the user has them
        self._num_eager = EAGER_STEPS - 1
        return why

    def _forget_if_changed(self) -> None:
        """Drop the graphs where they are no longer the user's step."""
        if self._watch is None or self._reads is None:
            return  # it is being captured
        held = [step.gradients for step in self._captured.values()]
        why = self._step_eagerly_if_changed() or self._reads.broken()
        why = why or leave_kept(held, self._world.size)
        if any(gradients.copies for gradients in held):
            self._copies_gradients = True
            self._note(COPIED)
        if why is None:
            return
        self._num_eager = EAGER_STEPS - 1
        self._recorder.count("recaptures")
        self._note(f"captured again because {why}")
        self.close()

    def _capture(self, signature: batches.Signature, batch: Any) -> CapturedStep | None:
        """A capture for this shape, or None where it is better run eagerly, which is counted."""
        if self._captured:
            is_repeated = self._shapes.is_worth_another(signature, len(self._captured))
            if self._world.size > 1 or not is_repeated:
                self._count_as_written(self._shapes.why_other(batch, OTHER_SHAPES))
                return None
        self._optimizer.settle()
        leaving.close_before_leaving(self)
        clearance.check_gradient_hooks(self._body)  # some may have come since the first call
        self._body.optimizer.zero_grad(set_to_none=True)
        unchanged = failed_attempts.unchanged_if_it_fails(self._body)
        with unchanged, left_as_found(self._body.model, self._body.loss_fn):
            step = self._checked_and_read(signature, batch)
        step.dropout.adopt()
        step.gradients.watch()
        self._is_compared = False  # what is captured later is of another shape, or has changed
        # Each check leaves the optimizer's state in other dictionaries.
        self._watch = CaptureWatch(self._body, has_optimizer=self._optimizer.is_inside)
        return step

    def _checked_and_read(self, signature: batches.Signature, batch: Any) -> CapturedStep:
        """A capture that equals the eager step, stamped where that costs little."""
        pool = next(iter(self._captured.values())).graph.pool() if self._captured else None
        step = self._checked(signature, batch, pool, has_stamps=True)
        if self._world.size == 1:
            frames = step.frames()
            if max((span.end_ns for span in frames), default=SHORT_NS) < SHORT_NS:
                step.close()
                step = self._checked(signature, batch, pool, has_stamps=False)
                self._recorder.add_frames(frames)
                self._recorder.is_brief = True
        self._recorder.counts["shapes"] = float(len(self._captured))
        if len(self._captured) == 1:
            self._read(step)
        return step

    def _read(self, step: CapturedStep) -> None:
        """Find what the code of the first captured step takes for granted."""
        try:
            self._reads = refused_unread(
                StepReads,
                self._body,
                step.batch,
                self._world.device.type,
                is_lifted=False,
                has_idle_draws=bool(self._clearance.idle_draws),
            )
            self._reads.check_batch_kept()
        except RidgelineError:
            self.close()
            raise
        if self._optimizer.is_inside:
            cleared.keep(self._body, step.batch, self._reads, self._clearance)

    def _checked(
        self, signature: batches.Signature, batch: Any, pool: Any, *, has_stamps: bool
    ) -> CapturedStep:
        """A capture that was found to equal the eager step."""
        random_state = torch.get_rng_state()  # the host's: a capture draws from it as a step does
        try:
            step = CapturedStep(
                self._body,
                batch,
                self._stream,
                pool,
                has_stamps=has_stamps,
                has_optimizer=self._optimizer.is_inside,
                idle_draws=self._clearance.idle_draws,
                copies_gradients=self._copies_gradients,
            )
        except CaptureError as error:
            leaving.abandon(str(error))
            raise
        finally:
            torch.set_rng_state(random_state)
        self._captured[signature] = step
        try:
            check_replay(
                self._body,
                step.batch,
                step.inputs,
                self._optimizer.rates,
                step.replay,
                world=self._world,
                notes=self._notes if has_stamps else [],  # the first check has said it
                stream=self._stream,
                shifts=ONE_SHIFT if self._is_compared else SHIFTS,
            )
        except RidgelineError:
            self.close()
            raise
        self._is_compared = True
        return step
