"""Compiling a step program: by Inductor in this process, or ahead of time into a file."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.runtime.hybrid.packages.aot import compile_program
from ridgeline.runtime.hybrid.packages.package import load_compiled
from ridgeline.runtime.hybrid.steps.binding import Call
from ridgeline.runtime.hybrid.steps.program import StepProgram

SMALL = 1 << 14
"""Elements of a tensor whose loops are over, on a CPU, before a second thread has woken up."""


def compiler_settings(program: StepProgram) -> dict[str, Any]:
    """Settings of torch's compiler for a program that must draw the random numbers of the eager step.

    `fallback_random` takes them from torch's own generators; with several draws the order counts, so
    operators are then left in the program's order.
    """
    settings: dict[str, Any] = {"fallback_random": True}
    if program.num_random_ops > 1:
        settings["reorder_for_peak_memory"] = False
    if all(tensor.numel() <= SMALL for tensor in program.arguments()):
        settings["cpp.threads"] = 1
    if any(tensor.is_cuda for tensor in program.arguments()):
        # torch 2.11 fails an assertion of its own when it reorders the loops of a grouped optimizer.
        settings["loop_ordering_after_fusion"] = False
    return settings


@contextlib.contextmanager
def _compiling(program: StepProgram) -> Iterator[None]:
    from torch._inductor import config

    try:
        with torch.no_grad(), config.patch(compiler_settings(program)):
            yield
    except (RuntimeError, AssertionError) as error:
        if isinstance(error, RidgelineError):
            raise
        reason = (str(error).strip() or "no message").splitlines()[0]
        raise CaptureError(
            f"wanted the step's program compiled, got {type(error).__name__}: {reason}; use another "
            "mode of execution, such as 'eager'"
        ) from error


def compile_graph(program: StepProgram) -> Call:
    """The program compiled by Inductor in this process: no guards, no autograd.

    Raises:
        CaptureError: the compiler failed; its message follows.

    Cost: 5 to 60 seconds of compiling, unless the compiler's cache knows the program.
    """
    from torch._inductor.compile_fx import compile_fx

    with _compiling(program):
        # The compiler changes the graph that it is given.
        graph = fx.GraphModule(program.graph, _copy(program.graph.graph))
        compiled: Any = compile_fx(graph, program.arguments())

    def call(flat: list[Tensor]) -> Sequence[Tensor]:
        return compiled(*flat)

    return call


class ProgramFile:
    """A program compiled ahead of time, in a temporary file.

    Attributes:
        path: The `.pt2` file; gone after `close()`.
    """

    def __init__(
        self, directory: tempfile.TemporaryDirectory[str], path: Path, device: torch.device
    ) -> None:
        self._directory = directory
        self._device = device
        self.path = path

    def load(self) -> Call:
        """The compiled program."""
        return load_compiled(self.path, self._device)

    def close(self) -> None:
        """Remove the file; what was loaded from it stays usable."""
        self._directory.cleanup()


def compile_file(program: StepProgram) -> ProgramFile:
    """The program compiled ahead of time by AOTInductor.

    Raises:
        CaptureError: the compiler failed; its message follows.

    Cost: 10 to 90 seconds of compiling.
    """
    directory = tempfile.TemporaryDirectory(prefix="ridgeline-step-")
    try:
        with _compiling(program):
            graph = fx.GraphModule(program.graph, _copy(program.graph.graph))
            path = compile_program(graph, program.arguments(), Path(directory.name))
    except BaseException:
        directory.cleanup()
        raise
    return ProgramFile(directory, path, program.arguments()[0].device)


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied
