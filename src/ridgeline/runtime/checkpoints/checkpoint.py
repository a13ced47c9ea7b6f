"""Checkpoints: the whole state of a training run, complete or not there at all.

    checkpoints/step-0000123/
        model/model-00001-of-00003.safetensors      the model's state dict under its own names, and so on
        training/model-00001-of-00008.safetensors   optimizer, scheduler and random states
        state.json                                  everything that is not a tensor
        manifest.json                               size and SHA-256 of every file, written last

Tensors are written and read by torch.distributed.checkpoint in its safetensors layout (see `tensor_files`),
so that `dcp.load` and whatever reads safetensors take them, too. A checkpoint is made in a directory whose
name starts with a dot, flushed to the disk and renamed: no reader ever sees a part of one. It is read once
every file was found to be as it was written. Workers along the data axis hold equal state, or a part each
that is made whole first. So the first one writes for all (see `layout.ownership`), and any number goes on.
"""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, ClassVar

import safetensors
from safetensors import SafetensorError
from torch import Tensor

from ridgeline import units
from ridgeline.codec import Noun, Value, encode, write_atomically
from ridgeline.errors import CheckpointError, FileFormatError
from ridgeline.runtime.checkpoints import checkpoint_directory
from ridgeline.runtime.checkpoints.checkpoint_directory import MANIFEST, STATE
from ridgeline.runtime.checkpoints.tensor_files import read_tensors, tensor_files, write_tensors

_FOLDERS = ("model", "training")
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_DIGITS = 12
"""Of a hash, in messages."""


class Position(Value, frozen=True, kw_only=True):
    """Where a run continues: `step_in_epoch` of `epoch` comes next; `step` steps are done in total."""

    epoch: int
    step_in_epoch: int
    step: int


class File(Value, frozen=True, kw_only=True):
    """One file of a checkpoint: path below its directory, size and content hash."""

    path: str
    num_bytes: int
    sha256: str


class Manifest(Noun, frozen=True, kw_only=True):
    """What a complete checkpoint holds; `manifest.json`."""

    kind: ClassVar[str] = "checkpoint"

    position: Position
    workers: int
    files: tuple[File, ...]


class _Sidecar(Noun, frozen=True, kw_only=True):
    kind: ClassVar[str] = "training-state"

    state: dict[str, Any]


class DamageError(Exception):
    """Says in a few words what is wrong with a checkpoint; the caller adds what to do about it."""


def write(
    directory: Path,
    position: Position,
    *,
    workers: int,
    model: dict[str, Tensor],
    training: dict[str, Tensor],
    state: dict[str, Any],
) -> Path:
    """Write one checkpoint, all or nothing, and return its path.

    Args:
        directory: The run's directory of checkpoints.
        position: Where the run continues; names the checkpoint.
        workers: Workers of the run.
        model: CPU tensors by name, which nobody changes meanwhile; see `write_tensors`.
        training: Likewise, for what is not the model.
        state: Plain JSON values.

    Raises:
        CheckpointError: the disk is full or refuses; nothing of this checkpoint stays.
    """
    target = checkpoint_directory.checkpoint_of(directory, position.step)
    temporary = checkpoint_directory.free_name(directory, f".{target.name}", ".tmp")
    needed = sum(t.nbytes for t in (*model.values(), *training.values()))
    try:
        temporary.mkdir(parents=True)
        for name, tensors in zip(_FOLDERS, (model, training), strict=True):
            write_tensors(temporary / name, tensors)
        write_atomically(temporary / STATE, encode(_Sidecar(state=state)))
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        files = tuple(_seal(temporary, path) for path in paths)
        manifest = Manifest(position=position, workers=workers, files=files)
        write_atomically(temporary / MANIFEST, encode(manifest))
        # Names become durable by their folder's fsync; before the rename, so that a named checkpoint is
        # whole.
        for folder in (*(temporary / name for name in _FOLDERS), temporary):
            checkpoint_directory.flush(folder)
        checkpoint_directory.place(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_refused(target, needed, error)) from error
    # An interrupt, too: what is half written would stay until a later run tidies.
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def inspect(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every file was read and found to be as it was written.

    Raises:
        DamageError: the manifest or a file is missing, damaged, unreadable or of another release, or there
            is a file beside its tensors that was not written with them.

    Cost: Reads every file; keeps none.
    """
    try:
        _check_kind(path / MANIFEST)
        manifest = Manifest.load(path / MANIFEST)
        # A copied or renamed directory would continue from another step than its name says.
        if path != checkpoint_directory.checkpoint_of(path.parent, manifest.position.step):
            raise DamageError(f"{MANIFEST} is that of step {manifest.position.step}")
        for file in manifest.files:
            _verify(path, file)
        _check_nothing_else(path, manifest)
        # A file may be as it was written and still be of another release.
        _Sidecar.load(path / STATE)
        for file in tensor_files(path):
            with safetensors.safe_open(file, "pt"):
                pass
    except OSError as error:
        name = Path(error.filename).name if error.filename else path.name
        raise DamageError(f"{name} cannot be read: {error.strerror or error}") from error
    except FileFormatError as error:
        # What follows advises people to make the file again, which nobody can.
        raise DamageError(str(error).rpartition("; ")[0]) from error
    except SafetensorError as error:
        raise DamageError(f"a file of tensors cannot be read: {error}") from error
    return manifest


def _check_kind(manifest: Path) -> None:
    """Refuse what no reading of a manifest comes to an end of, or begins with."""
    if not manifest.exists():
        raise DamageError(f"{MANIFEST} is missing")
    if not manifest.is_file() and not manifest.is_dir():
        raise DamageError(f"{MANIFEST} is no file")


def _check_nothing_else(path: Path, manifest: Manifest) -> None:
    """Refuse tensors that were not written with the checkpoint: who reads a folder reads all files in it."""
    written = {file.path for file in manifest.files}
    for folder in _FOLDERS:
        for file in sorted((path / folder).rglob("*")):
            name = file.relative_to(path).as_posix()
            if name not in written:
                raise DamageError(f"{name} does not belong to it")


def content(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Model tensors, training tensors and JSON state of a checkpoint that was inspected."""
    model, training = (read_tensors(path / name) for name in _FOLDERS)
    return model, training, _Sidecar.load(path / STATE).state


def read(path: Path) -> tuple[Manifest, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Manifest, model tensors, training tensors and JSON state of a checkpoint, all verified.

    Raises:
        CheckpointError: it is damaged; says how.
    """
    try:
        manifest = inspect(path)
    except DamageError as error:
        raise CheckpointError(
            f"wanted a whole checkpoint, got a damaged one in {path}: {error}; --resume continues from the "
            "newest whole one"
        ) from error
    return manifest, *content(path)


def _seal(root: Path, path: Path) -> File:
    """Make a file durable, and describe it as it is from now on."""
    # Opened again: fsync flushes a file whoever wrote it, and safetensors has closed its own handle.
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return File(
        path=path.relative_to(root).as_posix(), num_bytes=path.stat().st_size, sha256=_sha256(path)
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _verify(root: Path, file: File) -> None:
    path = root / file.path
    if not path.is_file():
        raise DamageError(f"{file.path} is missing, wanted {file.num_bytes} bytes")
    # The size first: a file that was cut short need not be read to be found out.
    size = path.stat().st_size
    if size != file.num_bytes:
        raise DamageError(f"{file.path}: wanted {file.num_bytes} bytes, got {size}")
    digest = _sha256(path)
    if digest != file.sha256:
        wanted, got = file.sha256[:_DIGITS], digest[:_DIGITS]
        raise DamageError(f"{file.path} was changed: wanted SHA-256 {wanted}..., got {got}...")


def _refused(target: Path, needed: int, error: OSError) -> str:
    # The directory itself may be what could not be made.
    parent = next(path for path in (target, *target.parents) if path.exists())
    free = units.num_bytes(shutil.disk_usage(parent).free)
    advice = (
        "make room there, or copy the run to another disk and name the copy with -o, and continue with "
        "--resume"
        if error.errno in _FULL
        else "fix it and continue with --resume"
    )
    return (
        f"wanted to write the checkpoint {target} ({units.num_bytes(needed)}), got "
        f"{error.strerror or error} with {free} free; the previous checkpoint is untouched: {advice}"
    )
