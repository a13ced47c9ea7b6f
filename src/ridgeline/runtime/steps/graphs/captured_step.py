"""One training step that was captured as a CUDA graph."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.capture.capturing import capturing
from ridgeline.capture.dropout_states import DropoutStates
from ridgeline.lint.idle_draws import IdleDraw
from ridgeline.optimizers.optimizer_calls import update
from ridgeline.reach.reach import Reach
from ridgeline.reach.renewals import renewals
from ridgeline.reach.sparse import strides_of
from ridgeline.reach.undo import Undo
from ridgeline.recording.clocks import BranchClock, Clock, DeviceClock, HostClock
from ridgeline.recording.recorder import Recorder, StepRecord, step_spans
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.tensors.batch import rebuilt
from ridgeline.tensors.batch_pattern import BatchPattern
from ridgeline.tensors.copies import copier, copies_of, repeats
from ridgeline.tensors.sameness import Sameness
from ridgeline.tensors.usual_batch import BatchReader
from ridgeline.timeline import Span


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

    Attributes:
        load: Copies the tensors of a batch to where the graph reads them.
        written: Places of those tensors that the step writes in place; see `give_back`.
        usual: Recognises the batches that it is mostly called with, once there was one.

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
    ) -> None:
        self._idle_draws = idle_draws
        flat, structure = pytree.tree_flatten(batch)
        tensors = [leaf for leaf in flat if isinstance(leaf, Tensor)]
        self.strides = [*map(strides_of, tensors)]
        self.repeats = repeats(tensors)
        self.inputs = copies_of(tensors)
        self.load = copier(self.inputs)
        before_writes = _num_writes(self.inputs)
        self.usual: BatchReader | None = None
        static = iter(self.inputs)
        self.batch = pytree.tree_unflatten(
            [next(static) if isinstance(leaf, Tensor) else leaf for leaf in flat], structure
        )
        # The optimizer may hold parameters of the loss, which the model does not list.
        held = {p for group in body.optimizer.param_groups for p in group["params"]}
        parameters = dict.fromkeys((*body.model.parameters(), *held))
        # No step clears these: the graph adds to what is there, so there must be something.
        empty = [p for p in parameters if p.requires_grad and p.grad is None and p not in held]
        for parameter in empty:
            parameter.grad = torch.zeros_like(parameter)
        self.has_stamps = has_stamps
        self._outside = None if has_optimizer else body.optimizer
        self._updated = body.updated
        clock: Clock = HostClock()
        if has_stamps:
            clock = DeviceClock(external=True) if body.synchronizer is None else BranchClock()
        recorder = Recorder(clock, starts=False)
        # The capture runs the step's Python once; what that changed has to be renewed beside each replay.
        before = Undo(body.model, body.loss_fn, values=False)
        self.dropout = DropoutStates(Reach(body.model, body.loss_fn).modules)
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
        counts = zip(_num_writes(self.inputs), before_writes, strict=True)
        self.written = [place for place, (now, before) in enumerate(counts) if now != before]
        self._renewals = renewals(before)
        self.pattern = BatchPattern(self.batch)
        for parameter in empty:
            if parameter.grad is not None and not parameter.grad._version:  # noqa: SLF001 - nothing was added
                parameter.grad = None
        self._gradients = [(p, p.grad) for p in parameters]
        shown = Sameness()
        for parameter in parameters:
            shown.attribute(parameter, "grad")
        self._shows_gradients = shown.compiled()
        # Nobody clears these between steps, so a replay has to continue from the user's present gradient.
        self._added_to = [(p, g) for p, g in self._gradients if p not in held and g is not None]
        self._record = recorder.current
        if not has_optimizer:
            self._record.end = torch.cuda.Event(enable_timing=True)  # behind the optimizer, outside
        self._clock = DeviceClock()

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
        if self.dropout.held:
            self.dropout.bring()
        self.graph.replay()
        if self.dropout.held:
            self.dropout.leave()
        for renew in self._renewals:
            renew()
        for draw in self._idle_draws:
            draw.repeat()
        if not self._shows_gradients():
            self.show_gradients()  # without them an optimizer outside would do nothing
        if self._outside is not None:
            update(self._outside)
            self._updated()
            if self.has_stamps:
                self._record.end.record()  # type: ignore[union-attr]
        return self._loss

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


def _num_writes(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]  # noqa: SLF001 - torch counts writes in place
