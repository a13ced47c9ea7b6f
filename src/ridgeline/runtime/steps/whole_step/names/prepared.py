"""A step's program that is ready to run, with what it puts under names."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ridgeline.runtime.steps.whole_step.binding import BoundStep, ReplayedStep
from ridgeline.runtime.steps.whole_step.compiling import ProgramFile
from ridgeline.runtime.steps.whole_step.program import StepProgram
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.tensors.batch_pattern import BatchPattern


class Prepared(NamedTuple):
    """A program for batches of one shape, ready to run."""

    pattern: BatchPattern
    reads: StepReads
    program: StepProgram
    step: BoundStep | ReplayedStep
    file: ProgramFile | None

    def run(self, inputs: Sequence[Tensor]) -> Tensor:
        """One step on the tensors of a batch; its loss."""
        for one, now in zip(self.program.carried, self.reads.carried(), strict=True):
            one.target.copy_(now.detach())
        loss, *others = self.step(inputs)
        self.program.shown.put(others, inputs)
        return loss
