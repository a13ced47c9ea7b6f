"""The directory of a run's checkpoints: its contents, remnants of killed runs, and how entries are deleted.

    step-0000123            a checkpoint; complete once it holds a manifest
    .step-0000123.tmp       one that is being written
    .step-0000123.old       one that is being deleted

A checkpoint gets its name, and loses it before deletion, by a single rename. A process that is killed at any
moment therefore leaves complete checkpoints, and remnants that are recognised by their names. A directory
that holds any other file was changed by a user, and is never deleted.
"""

import itertools
import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

NAME = "checkpoints"
"""Of this directory, in that of the run."""
MANIFEST = "manifest.json"
STATE = "state.json"
_CHECKPOINT = re.compile(r"step-(\d+)")
_REMNANT = re.compile(r"\.step-\d+(\.\d+)?\.(tmp|old)")
_FOLDER = re.compile(r"model|training")
_FILE = re.compile(
    r"(model|training)/model(-\d+-of-\d+\.safetensors|\.safetensors\.index\.json)"
    rf"|({re.escape(MANIFEST)}|{re.escape(STATE)})|\.(manifest|state)\.json\.\w+\.tmp"
)


def checkpoint_of(directory: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return directory / f"step-{step:07d}"


def step_of(checkpoint: Path) -> int:
    """The step number in the name of a checkpoint."""
    return int(checkpoint.name.removeprefix("step-"))


def named(directory: Path) -> list[Path]:
    """Everything with the name of a checkpoint, complete or not, oldest first."""
    if not directory.is_dir():
        return []
    found = [p for p in directory.iterdir() if _CHECKPOINT.fullmatch(p.name) and p.is_dir()]
    # By number, since names of more than seven digits sort before the others.
    return sorted(found, key=step_of)


def complete(directory: Path) -> list[Path]:
    """The complete checkpoints, oldest first; names alone are looked at, so that they may be damaged."""
    return [path for path in named(directory) if (path / MANIFEST).is_file()]


def latest(directory: Path) -> Path | None:
    """The newest complete checkpoint, or None; see `complete`."""
    return next(reversed(complete(directory)), None)


def remnants(directory: Path) -> list[Path]:
    """Half-written and half-deleted checkpoints that killed runs left behind."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _REMNANT.fullmatch(path.name)]
    # Earlier releases deleted a checkpoint in its place, its manifest first.
    found += [path for path in named(directory) if not os.path.lexists(path / MANIFEST)]
    return sorted(path for path in found if _is_ours(path))


def tidy(directory: Path, *, newest: Path, keep: int, skipped: Collection[Path] = ()) -> None:
    """Delete remnants, and all checkpoints before `newest` but the last ones.

    Args:
        directory: Of a run that has a whole checkpoint.
        newest: The one that the run has just written, or goes on from. Those after it stay where they are
            until the run gets there itself.
        keep: Checkpoints to keep, `newest` included; at least 1.
        skipped: Those found damaged, which do not count.

    Raises:
        OSError: something cannot be deleted.
    """
    for path in remnants(directory):
        shutil.rmtree(path)
    passed = [path for path in complete(directory) if step_of(path) <= step_of(newest)]
    kept = [path for path in passed if path not in skipped][-keep:]
    for path in passed:
        if path not in kept and _is_ours(path):
            shutil.rmtree(_withdraw(path))


def place(temporary: Path, target: Path) -> None:
    """Give a finished directory its name; what stood there is deleted, or set aside if it is a user's.

    Raises:
        OSError: it cannot be renamed.
    """
    previous = None
    if os.path.lexists(target):
        if _is_ours(target):
            previous = _withdraw(target)
        else:
            target.rename(free_name(target.parent, target.name, ".kept"))
    # A rename replaces no directory that has entries, so what stood there has made way by now.
    temporary.rename(target)
    flush(target.parent)
    if previous is not None:
        shutil.rmtree(previous)


def free_name(directory: Path, stem: str, suffix: str) -> Path:
    """A name that nothing has: the stem with the suffix, or with a number between them."""
    # Numbered, not random as those of `tempfile`: remnants are recognised by their names.
    names = (f"{stem}{f'.{n}' if n else ''}{suffix}" for n in itertools.count())
    return next(path for path in map(directory.joinpath, names) if not os.path.lexists(path))


def flush(path: Path) -> None:
    """Make the entries of a directory, or the contents of a file, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _withdraw(path: Path) -> Path:
    """Take a checkpoint's name away, durably before anything in it goes; where it lies then."""
    old = free_name(path.parent, f".{path.name}", ".old")
    path.rename(old)
    flush(path.parent)
    return old


def _is_ours(path: Path) -> bool:
    """Whether it is a directory of nothing but what checkpoints are made of; links are a user's."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(
        not inner.is_symlink()
        and (_FOLDER if inner.is_dir() else _FILE).fullmatch(inner.relative_to(path).as_posix())
        for inner in path.rglob("*")
    )
