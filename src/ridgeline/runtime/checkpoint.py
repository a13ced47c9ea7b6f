"""Checkpoints: the whole state of a training run, complete or not there at all.

    checkpoints/step-0000123/
        model/model-00001-of-00001.safetensors      the model's state dict under its own names
        training/model-00001-of-00001.safetensors   optimizer, scheduler and random states
        state.json                                  everything that is not a tensor
        manifest.json                               size and SHA-256 of every file, written last

Tensors are written by torch.distributed.checkpoint in its safetensors layout, so that they can also
be read by `dcp.load` and by whatever reads safetensors. A checkpoint is made in a directory whose
name starts with a dot, flushed to the disk and renamed: no reader ever sees a part of one. Data
parallel workers hold equal state, so rank 0 writes for all.
"""

import errno
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, ClassVar

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from ridgeline import units
from ridgeline.codec import Noun, Value, encode, write_atomically
from ridgeline.errors import CheckpointError, FileFormatError

DIRECTORY = "checkpoints"
_NAME = re.compile(r"step-(\d+)")
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_CHUNK_BYTES = 1 << 22


class Position(Value, frozen=True, kw_only=True):
    """Where a run continues: the next `step_in_epoch` of `epoch`; `step` steps are done in all."""

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


def directory_of(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return directory / f"step-{step:07d}"


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints in a directory, oldest first; names alone are looked at."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(
        (path for path in found if (path / "manifest.json").is_file()),
        key=lambda path: int(path.name.removeprefix("step-")),
    )


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    return next(reversed(complete(directory)), None)


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
        model: Contiguous CPU tensors that share no memory, by name.
        training: Likewise, for what is not the model.
        state: Plain JSON values.

    Raises:
        CheckpointError: the disk is full or refuses; nothing of this checkpoint stays.
    """
    target = directory_of(directory, position.step)
    temporary = directory / f".{target.name}.tmp"
    needed = sum(t.numel() * t.element_size() for t in (*model.values(), *training.values()))
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_tensors(temporary / "model", model)
        _write_tensors(temporary / "training", training)
        write_atomically(temporary / "state.json", encode(_Sidecar(state=state)))
        files = tuple(_describe(temporary, path) for path in sorted(temporary.rglob("*")))
        manifest = Manifest(
            position=position, workers=workers, files=tuple(f for f in files if f is not None)
        )
        write_atomically(temporary / "manifest.json", encode(manifest))
        for folder in (temporary / "model", temporary / "training", temporary):
            _flush(folder)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        _flush(directory)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(_refused(target, needed, error)) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def read(path: Path) -> tuple[Manifest, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Manifest, model tensors, training tensors and JSON state of a checkpoint, all verified.

    Raises:
        CheckpointError: a file is missing or damaged; names it, and the checkpoint to use instead.
    """
    try:
        manifest = Manifest.load(path / "manifest.json")
        for file in manifest.files:
            _verify(path, file)
        model = _read_tensors(path / "model")
        training = _read_tensors(path / "training")
        state = _Sidecar.load(path / "state.json").state
    except (OSError, FileFormatError, SafetensorError) as error:
        raise CheckpointError(_damaged(path, str(error))) from error
    return manifest, model, training, state


def prune(directory: Path, keep: int) -> None:
    """Delete all complete checkpoints but the newest `keep`, and what a killed run left unfinished."""
    for path in complete(directory)[:-keep]:
        # The manifest goes first, so that a deletion cut short leaves nothing that looks complete.
        (path / "manifest.json").unlink()
        shutil.rmtree(path)


def remove_unfinished(directory: Path) -> None:
    """Delete what a killed run left half written."""
    for path in directory.glob(".step-*.tmp"):
        shutil.rmtree(path, ignore_errors=True)


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, written through the planner and writer of torch.distributed.checkpoint.

    `dcp.save` would do the same calls, but warns in every process without a group and wraps OSError.
    """
    folder.mkdir()
    if not tensors:
        return
    writer = HuggingFaceStorageWriter(str(folder))
    # The tensors are on the host already; copying ahead would synchronise a CUDA stream from this thread.
    writer.per_thread_copy_ahead = 0
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tensors), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(planner.create_local_plan())]
    plans, metadata = planner.create_global_plan(plans)
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).wait()
    writer.finish(metadata, [results])


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors.update(safetensors.torch.load_file(file))
    return tensors


def _describe(root: Path, path: Path) -> File | None:
    if not path.is_file():
        return None
    return File(
        path=str(path.relative_to(root)), num_bytes=path.stat().st_size, sha256=_sha256(path)
    )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _verify(root: Path, file: File) -> None:
    path = root / file.path
    if not path.is_file():
        raise CheckpointError(_damaged(root, f"{path} is missing"))
    size = path.stat().st_size
    if size != file.num_bytes:
        raise CheckpointError(
            _damaged(root, f"{path} has {size} bytes instead of {file.num_bytes}")
        )
    if _sha256(path) != file.sha256:
        raise CheckpointError(_damaged(root, f"{path} has other content than when it was written"))


def _damaged(path: Path, what: str) -> str:
    older = [p for p in complete(path.parent) if p.name < path.name]
    advice = (
        f"delete {path} to resume from {older[-1]}"
        if older
        else f"delete {path} and start again, there is no older one"
    )
    return f"wanted a whole checkpoint, got a damaged one: {what}; {advice}"


def _refused(target: Path, needed: int, error: OSError) -> str:
    parent = next(path for path in (target, *target.parents) if path.exists())
    free = units.num_bytes(shutil.disk_usage(parent).free)
    advice = (
        "make room there, or choose another disk with -o, and go on with --resume"
        if error.errno in _FULL
        else "mend it and go on with --resume"
    )
    return (
        f"wanted to write the checkpoint {target} ({units.num_bytes(needed)}), got "
        f"{error.strerror or error} with {free} free; the previous checkpoint is untouched: {advice}"
    )


def _flush(folder: Path) -> None:
    """Make names in a directory durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
