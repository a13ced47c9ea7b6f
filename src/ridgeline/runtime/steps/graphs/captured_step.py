"""One training step that was captured as a CUDA graph."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import capturing
from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.lint.idle_draws import IdleDraw
from ridgeline.optimizers.optimizer_calls import update
from ridgeline.optimizers.shared_memory import WrittenMemory, has_memory, sharing
from ridgeline.reach.reach import Reach
from ridgeline.reach.renewals import renewals
from ridgeline.reach.sparse import strides_of
from ridgeline.reach.undo import Undo
from ridgeline.recording.clocks import BranchClock, Clock, DeviceClock, HostClock
from ridgeline.recording.recorder import Recorder, StepRecord, step_spans
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.graph_gradients import GraphGradients
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.tensors.batch import rebuilt
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.copies import copier, copies_of, num_writes, repeats
from ridgeline.tensors.usual_batch import BatchReader, usual_batch
from ridgeline.timeline import Span

OF_BATCHES = (
    "steps that write into memory that tensors of their batch have in common, with each other or with "
    "buffers, ran as they were written"
)


def _never(_: Iterable[int]) -> bool:
    """What is to be looked at otherwise."""
    return False


class CapturedStep:
    """One captured step: the graph, the tensors it reads the batch from, and its loss.

    Args:
        body: The step; what its optimizer holds has no gradients.
        batch: An example; its tensors are copied.
        stream: Captured on it.
        pool: Memory shared with other captures of the same step; None for its own.
        has_stamps: Whether the graph records when its frames begin.
        has_optimizer: Whether the optimizer is part of the graph; else it steps after each replay.
        idle_draws: Random numbers that each replay draws on the host.
        copies_gradients: Show copies of the gradients, which the next replay leaves as they are.

    Attributes:
        gradients: Those that it writes.
        load: Copies the tensors of a batch to where the graph reads them; of one like the last that was
            expected, or of any before.
        written: Places of those tensors that the step writes in place; see `give_back`.
        usual: Recognises batches like the last that was expected; see `expect`.
        is_apart: Whether the step writes no memory of such a batch; takes where those of its tensors begin.

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
        idle_draws: Sequence[IdleDraw] = (),
        copies_gradients: bool = False,
    ) -> None:
        self._idle_draws = idle_draws
        flat, structure = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self._repeats = repeats(tensors)
        self.inputs = copies_of(tensors)
        # Of the copies, which the code has seen: of a tensor with gaps, or an expanded one, they are others.
        self._strides = [*map(strides_of, self.inputs)]
        # Without gradients: the step may want some of its batch, and calls `requires_grad_` on these.
        self._loaded = [tensor.detach() for tensor in self.inputs]
        self.load = copier(self._loaded)
        before_writes = num_writes(self.inputs)
        self.usual: BatchReader | None = None
        self.is_apart: Callable[[Iterable[int]], bool] = _never
        static = iter(self.inputs)
        self.batch = pytree.tree_unflatten(
            [next(static) if isinstance(leaf, Tensor) else leaf for leaf in flat], structure
        )
        # The optimizer may hold parameters of the loss, which the model does not list.
        self.gradients = GraphGradients(
            body.model.parameters(), body.optimizer, copies=copies_gradients
        )
        self.has_stamps = has_stamps
        self._outside = None if has_optimizer else body.optimizer
        self._updated = body.updated
        clock: Clock = HostClock()
        if has_stamps:
            clock = DeviceClock(external=True) if body.synchronizer is None else BranchClock()
        recorder = Recorder(clock, starts=False)
        # The capture runs the step's Python once; what that changed has to be renewed beside each replay.
        before = Undo(body.model, body.loss_fn, values=False)
        reach = Reach(body.model, body.loss_fn)
        self.dropout = DropoutStates(reach.modules)
        held = [tensor for tensor in reach.tensors if not tensor.is_inference()]
        writes_before = num_writes(held)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, "the step", stream=stream, pool=pool):
            recorder.current = StepRecord(clock.stamp())
            step = body if has_optimizer else body.gradients
            self._loss = step(rebuilt(self.batch), recorder)
            # An event that the graph records must live as long as the graph does.
            if has_optimizer:
                recorder.current.end = clock.stamp()
            if isinstance(clock, DeviceClock):
                clock.join()
        counts = zip(num_writes(self.inputs), before_writes, strict=True)
        self.written = [place for place, (now, before) in enumerate(counts) if now != before]
        pairs = zip(held, num_writes(held), writes_before, strict=True)
        changed = [tensor for tensor, now, before in pairs if now != before]
        # With all buffers, as batch norm does not count what it writes.
        buffers = [b for one in reach.modules for b in one.buffers(recurse=False)]
        self._state = WrittenMemory([*changed, *buffers])
        self._renewals = renewals(before)
        self.pattern = BatchPattern(self.batch)
        self.gradients.take()
        self._record = recorder.current
        if not has_optimizer:
            self._record.end = torch.cuda.Event(enable_timing=True)  # behind the optimizer, outside
        self._clock = DeviceClock()

    def expect(self, batch: Any, tensors: Sequence[Tensor]) -> None:
        """Have batches that lie like this one recognised, and loaded in the way that is best for those."""
        self.usual = usual_batch(batch, tensors)
        self.is_apart = self._state.places.isdisjoint if all(map(has_memory, tensors)) else _never
        self.load = copier(self._loaded, tensors)

    def replay(self, *, are_shown: bool = False) -> Tensor:
        """Run the step; its loss, which the next replay overwrites.

        `are_shown` says that parameters are known to have the graph's gradients already.
        """
        gradients = self.gradients
        if gradients.added_to:
            gradients.bring()
        if self.dropout.held:
            self.dropout.bring()
        self.graph.replay()
        if self.dropout.held:
            self.dropout.leave()
        for renew in self._renewals:
            renew()
        for draw in self._idle_draws:
            draw.repeat()
        if not (are_shown or gradients.are_shown()):
            gradients.show()  # without them an optimizer outside would do nothing
        if self._outside is not None:
            update(self._outside)
            self._updated()
            if self.has_stamps:
                self._record.end.record()  # type: ignore[union-attr]
        return self._loss

    def bears_layout(
        self, batch: Any, tensors: Sequence[Tensor], reads: StepReads | None, num_workers: int
    ) -> bool:
        """Whether the step computes the same with a batch that lies otherwise in memory.

        Several workers, whose batches may differ in strides, continue together.

        Args:
            batch: Of the shapes that it was captured with.
            tensors: Those of the batch.
            reads: What the code of the step reads; None while that is unknown.
            num_workers: That train together.
        """
        is_alike = repeats(tensors) == self._repeats
        if num_workers > 1 or (is_alike and [*map(strides_of, tensors)] == self._strides):
            return is_alike
        return reads is None or reads.serves(batch)

    def mixes(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a batch's tensors share elements that the step writes: it has copies of them, which do not.

        Cost: 1 us a tensor; 1.5 us more where the step writes into its batch.
        """
        is_shared = self._state.meets(tensors)
        if is_shared or not self.written:
            return is_shared
        read = [tensor for place, tensor in enumerate(tensors) if place not in self.written]
        return sharing([tensors[place] for place in self.written], read) is not None

    def give_back(self, tensors: Sequence[Tensor]) -> None:
        """Write into a batch what the replay has written into its copies of it."""
        with torch.no_grad():
            for place in self.written:
                tensors[place].copy_(self.inputs[place])

    def frames(self) -> tuple[Span, ...]:
        """The frames of the last replay of a graph that has stamps.

        Cost: Waits for the device.
        """
        return step_spans(self._record, self._clock)

    def close(self) -> None:
        """Drop the graph, even if this step is still referenced (as by the traceback of a failed check)."""
        self.graph.reset()
