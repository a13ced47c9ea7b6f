"""The file that ships a program: what is in it, how it is written, and how it is looked at before use.

A package holds native code, and loading it runs that code: load packages only from people whom you trust
as you trust a program that they send you. Checksums guard against damage and mix-ups, not against malice.

It is an archive in the format of torch's own `.pt2` files, so `torch._inductor.aoti_load_package` opens it
as well; Ridgeline's metadata and the state (parameters and buffers, as safetensors) are further members.
"""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import safetensors.torch
import torch
from torch import Tensor
from torch._inductor import aoti_load_package

from ridgeline import codec
from ridgeline.errors import FileFormatError, PackageError, first_line
from ridgeline.lint.child_trial import try_in_child
from ridgeline.lint.child_worker import is_trial
from ridgeline.packages.archive import METADATA, SEAL, STATE, ArchiveReader, write_archive
from ridgeline.packages.consistency import difference, objection
from ridgeline.packages.host import describe_host, unmet
from ridgeline.packages.metadata import Metadata, TensorMetadata
from ridgeline.reach.generators import random_state_kept

Run = Callable[[list[Tensor]], list[Tensor]]
"""A loaded program: flat inputs to flat outputs."""


class Package:
    """A verified package; `read_package` makes it. Nothing of it has run yet.

    Attributes:
        path: The file.
        metadata: What is known of the program.
        device: Where it will run.
    """

    def __init__(
        self, path: Path, metadata: Metadata, device: torch.device, state: os.stat_result
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.device = device
        self._identity = _identity(state)

    def state(self) -> dict[str, Tensor]:
        """The saved tensors, in fresh memory on the device; any may be written to.

        Raises:
            PackageError: the file was replaced since it was verified, or its tensors are others than it
                describes.

        Cost: Reads and allocates all of them.
        """
        with self.path.open("rb") as file:
            self._check_unchanged(os.fstat(file.fileno()))
            content = ArchiveReader(file, str(self.path)).read(STATE)
        try:
            tensors = safetensors.torch.load(content)
        except safetensors.SafetensorError as error:
            raise _misdescribed(self.path, f"tensors that cannot be read: {error}") from error
        differs = difference(self.metadata, tensors)
        if differs:
            raise _misdescribed(self.path, differs)
        try:
            return {
                name: spec.restore(tensors[name], self.device)
                for name, spec in self.metadata.state.items()
            }
        except RuntimeError as error:  # no memory for it, which a stride may ask for
            raise _misdescribed(self.path, first_line(error, type(error).__name__)) from error

    def load_program(self) -> Run:
        """Load the native code; the result takes and returns flat lists of tensors.

        The program takes its state as its first inputs, in the order of `metadata.state`. It is loaded for
        callers that take turns: calls from several threads at once need a lock, or a program each.

        Raises:
            PackageError: the file was replaced since it was verified, or the system refuses to load the code.

        Cost: Unpacks the code to a temporary folder, which goes when the program does.
        """
        self._check_unchanged(self.path.stat())
        return load_compiled(self.path, self.device)

    def _check_unchanged(self, state: os.stat_result) -> None:
        if _identity(state) != self._identity:
            raise PackageError(
                f"wanted {self.path} as it was verified, got a file replaced since; load it again"
            )


@random_state_kept()
def load_compiled(path: Path, device: torch.device) -> Run:
    """Load what AOTInductor compiled, without looking at it: for files this process made or verified.

    Random generators stay where they are.

    Raises:
        PackageError: the system refuses to load the code, or loading it ended a process.

    Cost: For a GPU, the first time in a process, starts another one to see whether that survives.
    """
    if device.type == "cuda":
        _check_survives(path)
    # AOTInductor takes -1 for the current GPU.
    index = -1 if device.type == "cpu" or device.index is None else device.index
    # Loading makes the program's GPU the current one; it is not to stay that.
    kept = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    try:
        with kept:
            model = aoti_load_package(str(path), run_single_threaded=True, device_index=index)
    # Damage where torch says what a file is, which no seal covers: its reader in Python raises all of these.
    except (RuntimeError, ValueError, AssertionError) as error:
        raise PackageError(
            f"wanted to load the program in {path}, got {first_line(error, type(error).__name__)}; package "
            "it again on this machine"
        ) from error
    # The model's own call parses the structure of its inputs every time: twice the cost of a small network.
    return model.loader.run


_survived: list[Path] = []

LOAD_LIMIT_S = 180.0
"""A child imports torch, starts a GPU and loads a program: some 10 s. It is a minute where the C++ compiler
is slow, which torch asks what the processor can do."""


def _check_survives(path: Path) -> None:
    """Load a program in a child process first, once: an installation where that crashes is known.

    Raises:
        PackageError: the child did not survive.
    """
    if _survived or is_trial():
        return
    outcome = try_in_child(load_once, {"path": str(path)}, limit_s=LOAD_LIMIT_S)
    if outcome.status == "failed":
        raise PackageError(
            f"wanted to load the program in {path}, got a process that {outcome}; torch "
            f"{torch.__version__} as installed here cannot run packaged programs on this GPU: use another "
            "mode, another torch, or another C++ compiler (set CXX)"
        )
    _survived.append(path)


def load_once(path: str) -> None:
    """Load a program and drop it; what a child process does to find out whether that works."""
    load_compiled(Path(path), torch.device("cuda"))


def check_path(path: str | Path) -> Path:
    """The path to write a package to.

    Raises:
        PackageError: it does not end in `.pt2`.
    """
    target = Path(path)
    if target.suffix != ".pt2":
        raise PackageError(
            f"wanted a path that ends in .pt2 for a saved program, got {target}; torch reads programs from "
            "such files only"
        )
    return target


def write_package(
    path: str | Path,
    *,
    program: Path,
    metadata: Metadata,
    state: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write a package, atomically, and return its path.

    Args:
        path: The file; must end in `.pt2`.
        program: What `compile_program` wrote, or a package whose program is to be saved with other state.
        metadata: Purpose, device, inputs and outputs; the rest is filled in.
        state: Tensors to save with it, by name; their order is that of the program's first inputs.

    Raises:
        PackageError: the path does not end in `.pt2`, or a tensor is of a type that cannot be saved.
        OSError: no room or no permission; whatever stood there before is untouched.

    Cost: Copies the state to the host, and waits for the device to do so.
    """
    target = check_path(path)
    tensors = dict(state or {})
    filled = msgspec.structs.replace(
        metadata,
        host=describe_host(torch.device(metadata.device)),
        state={name: TensorMetadata.of(tensor) for name, tensor in tensors.items()},
    )

    def seal(checksums: dict[str, str]) -> bytes:
        return codec.encode(msgspec.structs.replace(filled, checksums=checksums))

    target.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system, so that the finished file is moved there by a rename.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as directory:
        weights = Path(directory) / "state.safetensors"
        _save_tensors(tensors, weights)
        members: dict[str, bytes | Path] = {**_program_members(program), STATE: weights}
        write_archive(target, members, seal)
    return target


def read_package(path: str | Path, *, device: str | torch.device | None = None) -> Package:
    """Verify a package without running anything of it.

    Args:
        path: The file.
        device: Where it is to run: `cpu`, `cuda` or `cuda:1`; None for the kind it was made for.

    Raises:
        PackageError: there is no such file, or it cannot be read; it is damaged, foreign or was edited; or
            its program was made for another device, processor, GPU or version of torch.

    Cost: Reads the whole file once.
    """
    try:
        return _read(Path(path), device)
    except OSError as error:
        raise PackageError(
            f"wanted a program saved by Ridgeline, got {error.strerror or error} for {path}; give the path "
            "of a file written by save() that this user may read"
        ) from error


def _read(source: Path, device: str | torch.device | None) -> Package:
    """See `read_package`; the file itself may refuse."""
    if not source.is_file():
        what = "a directory" if source.is_dir() else "no such file"
        raise PackageError(
            f"wanted a program saved by Ridgeline, got {what} at {source}; give the path of a file written "
            "by save()"
        )
    with source.open("rb") as file:
        reader = ArchiveReader(file, str(source))
        try:
            metadata = codec.decode(Metadata, reader.metadata(), where=str(source))
        except FileFormatError as error:
            raise PackageError(str(error)) from error
        reader.check_members(metadata.checksums)
        # Of the open file: one that is put in its place meanwhile is another.
        identity = os.fstat(file.fileno())
    impossible = objection(metadata)
    if impossible:
        raise _misdescribed(source, impossible)
    return Package(source, metadata, _fitting_device(metadata, device, source), identity)


def _misdescribed(path: Path, what: str) -> PackageError:
    return PackageError(
        f"wanted a description of the tensors that fits a saved program, got {what}, in {path}; save the "
        "program again with this release"
    )


def _fitting_device(
    metadata: Metadata, device: str | torch.device | None, path: Path
) -> torch.device:
    wanted = torch.device(device or metadata.device)
    if wanted.type != metadata.device:
        raise PackageError(
            f"wanted a program for {wanted.type}, got one made for {metadata.device} in {path}; save it "
            f"again from a model on {wanted.type}"
        )
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise PackageError(
            f"wanted a CUDA device for the program in {path}, got none on this machine; run it where "
            "there is one, or save it again from a model on cpu"
        )
    lacking = unmet(metadata.host, describe_host(wanted), wanted.type) if metadata.host else None
    if lacking:
        raise PackageError(
            f"wanted {lacking[0]}, for which the program in {path} was made, got {lacking[1]}; save it again "
            "here, from the model's source"
        )
    if wanted.type == "cuda" and wanted.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return wanted


def _program_members(program: Path) -> dict[str, bytes | Path]:
    """The members of what AOTInductor wrote, below its root folder; of a package, those that torch wrote."""
    with zipfile.ZipFile(program) as archive:
        members = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    # The generated source is not used here, and names folders of this machine; torch looks at the name of
    # its file only.
    return {
        name: b"" if name.endswith(".cpp") else content
        for name, content in members.items()
        if name not in (METADATA, SEAL, STATE)
    }


def _save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Save every tensor by itself: what shares memory here, such as views, is saved once for each name."""
    for name, tensor in tensors.items():
        try:
            safetensors.torch.save({"": torch.empty(0, dtype=tensor.dtype, device="cpu")})
        except (KeyError, ValueError, safetensors.SafetensorError) as error:
            raise PackageError(
                f"wanted tensors of types that safetensors can hold, got {TensorMetadata.of(tensor)} for "
                f"{name}; keep tensors of other types out of the program"
            ) from error
    copies = {
        name: tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    try:
        safetensors.torch.save_file(copies, path)
    except safetensors.SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def _identity(state: os.stat_result) -> tuple[int, int, int, int]:
    # A file put in its place by a rename has another inode, one that is written to another time.
    return (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
