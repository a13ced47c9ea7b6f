"""A run directory that is ours: made when its name is chosen, and written by one process at a time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ridgeline.cli.arguments import run_directory
from ridgeline.errors import RidgelineError

LOCK = "lock"
"""Held by the process that trains; its content is the number of that process."""
_OURS = {LOCK, run_directory.PENDING}


@contextlib.contextmanager
def claimed(task: str, given: Path | None, *, resume: bool) -> Iterator[Path]:
    """The directory of this run, which no other run writes until the `with` block ends.

    What was made for it goes again if nothing was written by then.

    Raises:
        CheckpointError: a run is to be resumed where there is none.
        RidgelineError: the directory already holds something, another process writes it, or it cannot be made
            or written.
    """
    with contextlib.ExitStack() as stack:
        try:
            path = _claim(task, given, stack, resume=resume)
        except OSError as error:
            raise RidgelineError(_refused(error, given, resume=resume)) from error
        yield path


def _claim(task: str, given: Path | None, stack: contextlib.ExitStack, *, resume: bool) -> Path:
    """See `claimed`; the system's own refusals are `OSError` here."""
    if resume:
        path = run_directory.of_run(task, given)
    elif given is not None:
        if given.exists() and not given.is_dir():
            raise RidgelineError(
                f"wanted a new or empty run directory, got {given}, which is no directory; name another with "
                "-o"
            )
        path = given
        _make(path, stack, exist_ok=True)
    else:
        path = _make_fresh(task, stack)
    # Locked before it is looked into, so that nobody writes in between.
    stack.enter_context(_locked(path))
    if not resume and {entry.name for entry in path.iterdir()} - _OURS:
        raise _taken(path)
    return path


def _refused(error: OSError, given: Path | None, *, resume: bool) -> str:
    """What is said where the system lets nobody write."""
    place = error.filename or given
    where = f" for {place}" if place else ""
    # The run is where it is: another name would be that of another run.
    other = "copy the run to where you can, and name the copy" if resume else "name another"
    return (
        f"wanted a run directory that can be written, got {error.strerror or error}{where}; make it "
        f"writable, or {other} with -o"
    )


def _taken(path: Path) -> RidgelineError:
    return RidgelineError(
        f"wanted a new or empty run directory, got {path}, which holds something already; name another with "
        "-o, or continue that run with --resume"
    )


def _make_fresh(task: str, stack: contextlib.ExitStack) -> Path:
    """A new directory of a default name."""
    while True:
        path = run_directory.fresh(task)
        try:
            _make(path, stack, exist_ok=False)
        except FileExistsError:  # another run took the name in the meantime
            continue
        return path


def _make(path: Path, stack: contextlib.ExitStack, *, exist_ok: bool) -> None:
    """Make a directory with its parents; at the end those that were made and are empty are removed."""
    # Noted before any is made: afterwards nobody knows which were there.
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(exist_ok=exist_ok)
    # The stack runs them backwards, so that the innermost directory goes first.
    for place in reversed(missing):
        stack.callback(_remove_if_empty, place)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something, or is gone
        path.rmdir()


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a run directory; the system releases it too when this process dies."""
    path = run_dir / LOCK
    handle = _open_locked(path)
    try:
        # What the owner before wrote may be longer than our number.
        os.ftruncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        yield
    finally:
        # While it is held: who opened the old file sees by `samestat` that its lock counts for nothing.
        for name in _OURS:
            (run_dir / name).unlink(missing_ok=True)
        fcntl.flock(handle, fcntl.LOCK_UN)  # also for what was forked from here
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _open_locked(path: Path) -> int:
    """The lock file, locked; one that its owner removed in between counts for nothing."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(handle, path):
                return handle
        except BlockingIOError:
            owner = os.read(handle, 32).decode() or "without a number yet"
            os.close(handle)
            raise RidgelineError(
                f"wanted a run directory that no other process writes, got {path.parent}, which is being "
                f"written by process {owner}; wait for it or name another directory with -o"
            ) from None
        os.close(handle)
