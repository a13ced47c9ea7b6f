"""Compiling a step program: by Inductor in this process, or ahead of time into a file."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.callables.calls.forms import brief
from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.packages.aot import compile_program
from ridgeline.packages.package import load_compiled
from ridgeline.packages.program_trial import try_package
from ridgeline.programs import inductor
from ridgeline.programs.reshaping import reshaping
from ridgeline.runtime.steps.whole_step.binding import BoundStep, Call, ReplayedStep
from ridgeline.runtime.steps.whole_step.program import StepProgram
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.tensors.batch_pattern import BatchPattern

SMALL = 1 << 14
"""Elements of a tensor whose loops are over, on a CPU, before a second thread has woken up."""


def compiler_settings(program: StepProgram) -> dict[str, Any]:
    """Settings of torch's compiler for a program that must draw the random numbers of the eager step.

    `fallback_random` takes them from torch's own generators; with several draws the order counts, so
    operators are then left in the program's order.
    """
    settings: dict[str, Any] = dict(inductor.plain_options())
    if program.num_random_ops > 1:
        settings["reorder_for_peak_memory"] = False
        if torch.__version__ < "2.13":
            # Torch 2.11 moves what draws next to what reads it; 2.13 leaves it in its place.
            settings["reorder_for_locality"] = False
        if not _is_on_gpu(program) and torch.__version__ < "2.12":
            # In that order torch 2.11 joins what reads random numbers with what makes room for them.
            settings["max_fusion_size"] = 1
    if all(tensor.numel() <= SMALL for tensor in program.arguments()):
        settings["cpp.threads"] = 1
    if _is_on_gpu(program):
        # torch 2.11 fails an assertion of its own when it reorders the loops of a grouped optimizer.
        settings["loop_ordering_after_fusion"] = False
    return settings


def compile_graph(program: StepProgram, notes: list[str]) -> Call:
    """The program compiled by Inductor in this process: no guards, no autograd.

    Args:
        program: On a GPU, to be replayed as a CUDA graph.
        notes: Receives what was done differently, and why.

    Raises:
        CaptureError: the compiler failed; its message follows.

    Cost: 5 to 60 seconds of compiling, unless the compiler's cache knows the program.
    """
    inputs, settings = program.arguments(), compiler_settings(program)
    with accepted("compiled"), torch.no_grad():
        # A copy: the compiler changes the graph that it is given.
        graph = reshaping(program.graph)
        compiled = (
            inductor.compile_replayed(graph, inputs, notes=notes, settings=settings)
            if _is_on_gpu(program)
            else inductor.compile_plain(graph, inputs, settings=settings)
        )

    def call(flat: list[Tensor]) -> Sequence[Tensor]:
        return compiled(*flat)

    return call


@contextlib.contextmanager
def accepted(done: str) -> Iterator[None]:
    """What torch raises inside, of whatever type, says that it cannot have the step's program `done`.

    Raises:
        CaptureError: instead; the first line of what torch said follows, all of it is the cause.
    """
    try:
        yield
    except RidgelineError:
        raise
    except Exception as error:
        raise CaptureError(
            f"wanted the step's program {done}, got {brief(error)}; use another mode of execution, such as "
            "execution='eager'"
        ) from error


def _is_on_gpu(program: StepProgram) -> bool:
    return any(tensor.is_cuda for tensor in program.arguments())


class ProgramFile(NamedTuple):
    """A program compiled ahead of time, in a temporary file.

    Attributes:
        directory: Holds the file.
        path: The `.pt2` file; gone after `close()`.
        device: That it runs on.
    """

    directory: tempfile.TemporaryDirectory[str]
    path: Path
    device: torch.device

    def load(self) -> Call:
        """The compiled program."""
        return load_compiled(self.path, self.device)

    def close(self) -> None:
        """Remove the file; what was loaded from it stays usable."""
        self.directory.cleanup()


class Prepared(NamedTuple):
    """A program for batches of one shape that is ready to run, with what it puts under names."""

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


def compile_file(program: StepProgram) -> ProgramFile:
    """The program compiled ahead of time by AOTInductor.

    Raises:
        CaptureError: the compiler failed; its message follows.

    Cost: 10 to 90 seconds of compiling.
    """
    from torch._inductor import config

    directory = tempfile.TemporaryDirectory(prefix="ridgeline-step-")
    try:
        with accepted("compiled"), torch.no_grad(), config.patch(compiler_settings(program)):
            path = compile_program(program.graph, program.arguments(), Path(directory.name))
            # In a child: a wrong native program may end the process that loads it.
            try_package(path, program.arguments())
    except BaseException:
        directory.cleanup()
        raise
    return ProgramFile(directory, path, program.arguments()[0].device)
