"""Saving a whole training step: the program, everything that it trains, and the random state.

A process without the model's source loads the file and continues training with the same losses. Settings that
are numbers of Python are part of the program and cannot change any more; learning rates can.
"""

from pathlib import Path

import msgspec
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import PackageError
from ridgeline.packages.metadata import Metadata, TensorMetadata
from ridgeline.packages.package import Package, write_package
from ridgeline.runtime.steps.whole_step.compiling import ProgramFile, compile_file
from ridgeline.runtime.steps.whole_step.guards import baked_settings
from ridgeline.runtime.steps.whole_step.program import StepProgram
from ridgeline.runtime.steps.whole_step.saved.details import Constant, SavedRandomState, StepDetails
from ridgeline.runtime.steps.whole_step.saved.loaded import LoadedStep


def save_step(path: str | Path, program: StepProgram, *, file: ProgramFile | None = None) -> Path:
    """Write a training step to `path`, atomically, and return the path.

    Args:
        path: Must end in `.pt2`.
        program: The traced step, with the state as it is now.
        file: The program compiled ahead of time, if that was done before; stays open.

    Raises:
        CaptureError: the compiler failed.
        PackageError: the path does not end in `.pt2`, or the batch is of types that no file can name.
        OSError: the file cannot be written; what was there is untouched.

    Cost: 10 to 90 seconds of compiling without `file`. Copies the state to the host.
    """
    if program.carried:
        raise PackageError(
            f"wanted a step whose state is in its model and optimizer to save it, got {len(program.carried)} "
            "tensors that it keeps under other names for the next step; make them buffers (register_buffer)"
        )
    metadata = _describe(program)
    state = {entry.name: entry.tensor for entry in program.state}
    if file is not None:
        return write_package(path, program=file.path, metadata=metadata, state=state)
    own = compile_file(program)
    try:
        return write_package(path, program=own.path, metadata=metadata, state=state)
    finally:
        own.close()


def _describe(program: StepProgram) -> Metadata:
    flat, structure = pytree.tree_flatten(program.batch)
    constants: dict[str, Constant] = {}
    for index, leaf in enumerate(flat):
        if isinstance(leaf, Tensor):
            continue
        if not (leaf is None or isinstance(leaf, bool | int | float | str)):
            raise PackageError(
                f"wanted a batch of tensors, numbers and texts to save its step, got {type(leaf).__name__} "
                f"as leaf {index}; convert it, or leave it out of the batch"
            )
        constants[str(index)] = leaf
    loss = TensorMetadata.of(program.loss)
    details = StepDetails(
        roles=tuple(entry.role for entry in program.state),
        aliases=program.lifted.aliases(),
        constants=constants,
        random=SavedRandomState.now(program.device),
        baked=tuple(str(dict(settings)) for settings in baked_settings(program.lifted.optimizer)),
        clip_norm=program.clip_norm,
        accumulate=program.accumulate,
        written=program.written,
    )
    return Metadata(
        purpose="step",
        device="cuda" if program.device.type == "cuda" else "cpu",
        inputs=tuple(TensorMetadata.of(tensor) for tensor in program.inputs),
        outputs=(loss,),
        input_tree=dump_structure(structure),
        output_tree=dump_structure(pytree.tree_structure(0.0)),
        details=msgspec.to_builtins(details),
    )


def dump_structure(structure: pytree.TreeSpec) -> str:
    """The structure as text.

    Raises:
        PackageError: it has a container of the user's own.
    """
    try:
        return pytree.treespec_dumps(structure)
    except NotImplementedError as error:
        raise PackageError(
            f"wanted a batch of tuples, lists and dicts to save its step, got {structure}; rebuild the batch "
            "from these before the step"
        ) from error


def load_step(package: Package) -> LoadedStep:
    """The training step in a verified package; sets torch's generators to the saved random state.

    So dropout continues where it was when the step was saved. Seed afterwards to draw other numbers.

    Raises:
        PackageError: the package holds no training step, or does not describe it.

    Cost: Reads the state, loads native code, and on a GPU captures a CUDA graph.
    """
    metadata = package.metadata
    if metadata.purpose != "step":
        raise PackageError(
            f"wanted a package of a training step, got one of a {metadata.purpose} in {package.path}; save "
            "it with save() of a training step"
        )
    try:
        details = msgspec.convert(metadata.details, StepDetails)
        structure = pytree.treespec_loads(metadata.input_tree)
    except (msgspec.ValidationError, ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise _unusable(package.path, error) from error
    state = package.state()
    if len(details.roles) != len(state):
        raise _unusable(package.path, f"{len(details.roles)} roles for {len(state)} tensors")
    num_inputs = len(metadata.inputs) + len(details.constants)
    if num_inputs != structure.num_leaves:
        raise _unusable(
            package.path, f"{num_inputs} inputs for {structure.num_leaves} leaves of a batch"
        )
    if any(not 0 <= place < len(metadata.inputs) for place in details.written):
        raise _unusable(package.path, f"writes into inputs {details.written} of {num_inputs}")
    # Before the generators are set: on a GPU the calls before the capture draw from them.
    step = LoadedStep(package, details, structure, state)
    try:
        details.random.apply(package.device)
    except (ValueError, RuntimeError) as error:
        raise _unusable(package.path, error) from error
    return step


def _unusable(path: Path, reason: object) -> PackageError:
    return PackageError(
        f"wanted the description of a training step, got one that does not fit: {reason}, in {path}; save "
        "the step again with this release"
    )
