"""AOTInductor: from a traced program to native code in a file."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ridgeline.errors import CaptureError, first_line
from ridgeline.packages import kept_programs
from ridgeline.packages.compilers import working_compiler
from ridgeline.programs.draws import narrow_permutations
from ridgeline.programs.extremes import rounding_options
from ridgeline.programs.inductor import FAILURES, ignore_advice, require_written
from ridgeline.programs.joint_passes import keep_written
from ridgeline.programs.reshaping import reshaping
from ridgeline.programs.watches.hooks_of_all import no_hooks_of_all_modules
from ridgeline.reach.generators import random_state_kept
from ridgeline.tensors.nests import tensors_in

SETTINGS: dict[str, str | int | bool] = {
    # The compiler's own random numbers differ from torch's: with these a program drops out what the
    # plain one would.
    "fallback_random": True,
    # Folding weights into the code would freeze them; they are inputs, and stay changeable.
    "freezing": False,
}
"""Set for the compilation only; the process's own settings stay as they are."""

LARGEST_IN_LOOP = 1 << 18
"""Elements of a matrix up to which a row times the matrix is faster as a plain loop than in the BLAS library.

Source: measured on a 2-core AVX2 processor, one thread: 1.4 times the speed for a 512-256-128-2 network at
batch 1, and 0.8 times for 2048 x 2048. The bound is 1 MiB of float32, what a core's own cache holds.
"""


@random_state_kept()  # compilers draw numbers to try kernels with, and to mark files
def compile_program(
    program: ExportedProgram | GraphModule, inputs: Sequence[Tensor], directory: Path
) -> Path:
    """Compile a program and return the path of the `.pt2` file, in `directory`.

    What the graph updates in place is updated in the tensors that a call passes. Shapes, types,
    strides and device become those of the inputs, and the number of threads that of now. A tensor that
    hangs on the graph as an attribute becomes a constant: lift what may change to an input. Random generators
    stay where they are.

    Args:
        program: A graph over flat tensors, or what `torch.export` made of it.
        inputs: Example tensors in the order of the graph's inputs; their values are not used.
        directory: An existing folder.

    Raises:
        CaptureError: there is no C++ compiler, or the compiler refuses the program or an input.

    Cost: Runs the C++ compiler: 5 to 60 seconds, several cores and some hundred MB of memory; less than a
        second where the same program was compiled on this machine before (see `kept_programs`).
    """
    # First, as the compiler would take signs that are only noted for written, without a word.
    require_written(inputs)
    compiler = working_compiler().path
    handle, name = tempfile.mkstemp(dir=directory, suffix=".pt2")
    # Only the name is wanted: the compiler writes the file itself.
    os.close(handle)
    try:
        with torch.no_grad(), _compiler_warnings_ignored(), no_hooks_of_all_modules():
            exported = _exported(program, inputs)
            keep_written(exported.graph)
            settings = {**_settings_for(exported), "cpp.cxx": (compiler,)}
            # Of the exported graph with our changes in it: another version of these is another program.
            key = kept_programs.key_of(exported, settings)
            if key is None or not kept_programs.recall(key, Path(name)):
                aoti_compile_and_package(exported, package_path=name, inductor_configs=settings)
                if key is not None:
                    kept_programs.keep(key, Path(name))
    except FAILURES as error:
        message = first_line(error)
        raise CaptureError(
            f"wanted native code for a program of {len(inputs)} inputs, got {type(error).__name__}: "
            f"{message}; use another mode of execution for it"
        ) from error
    return Path(name)


def _exported(program: ExportedProgram | GraphModule, inputs: Sequence[Tensor]) -> ExportedProgram:
    if isinstance(program, ExportedProgram):
        return program
    graph = reshaping(program)
    narrow_permutations(graph)
    # Not strict: the graph is traced already, and TorchDynamo would read it once more.
    return torch.export.export(graph, tuple(inputs), strict=False)


def _settings_for(program: ExportedProgram) -> dict[str, Any]:
    settings = {**SETTINGS, **rounding_options(program.graph_module)}
    if not _is_small(program):
        return settings
    # A row times a matrix as a plain loop; and a loop that short is over before a second thread has woken up.
    return {**settings, "post_grad_fusion_options": {"decompose_mm_pass": {}}, "cpp.threads": 1}


def _is_small(program: ExportedProgram) -> bool:
    """Whether a program for the processor multiplies single rows only, and everything in it is small.

    The pass that makes loops of products takes them all, and batched products of any size with them.
    """
    has_row = False
    for node in program.graph.nodes:
        name = node.target.__name__ if isinstance(node.target, OpOverload) else ""
        values = tensors_in(node.meta.get("val"))
        if any(value.is_cuda or value.numel() > LARGEST_IN_LOOP for value in values):
            return False
        if name.startswith(("mm.", "addmm.", "linear.")):
            if values[0].dim() != 2 or values[0].shape[0] != 1:
                return False
            has_row = True
        elif name.startswith(
            ("bmm", "baddbmm", "matmul", "einsum", "conv", "_scaled_dot", "scaled_dot")
        ):
            return False
    return has_row


@contextlib.contextmanager
def _compiler_warnings_ignored() -> Iterator[None]:
    """Ignore what torch's compiler says of torch: it uses features of its own that it calls deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        ignore_advice()
        yield
