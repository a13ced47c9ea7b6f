"""A process that is killed at a file operation of its choice, without ending: nothing reaches the disk after.

Counted are the calls that change what is below a directory. The call with the chosen number does not happen
(of a write, half does), and neither does any later one, cleaning up included.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

CALLS = ("mkdir", "rename", "replace", "unlink", "remove", "rmdir", "fsync")


class KilledError(BaseException):
    """Stands for SIGKILL: no handler of errors expects it."""


class Disk:
    """What a process may still do to a directory; `log` lists what it did.

    Args:
        root: The directory.
        stop: The first call that does not happen: its number, from 0, or how it begins; None lets all happen.
        kill: Called instead; None raises `KilledError`.
    """

    def __init__(
        self, root: Path, stop: int | str | None = None, kill: Callable[[], object] | None = None
    ) -> None:
        self.log: list[str] = []
        self._root = str(root)
        self._stop = stop
        self._kill = kill
        self._is_dead = False

    @property
    def is_dead(self) -> bool:
        """Whether the call was reached."""
        return self._is_dead

    @contextmanager
    def patched(self) -> Iterator["Disk"]:
        """Every call of this process goes through here."""
        with mock.patch.multiple(os, **{name: self._wrapped(name) for name in CALLS}):
            opening = self._opening(io.open)
            with (
                mock.patch.object(os, "open", self._os_open(os.open)),
                mock.patch.object(io, "open", opening),
                mock.patch.object(builtins, "open", opening),
            ):
                yield self

    def call(self, name: str, path: Any, dir_fd: int | None = None) -> None:
        """Note a call before it happens, unless it is elsewhere or the process is dead."""
        place = _resolved(path, dir_fd)
        if not place.startswith(self._root):
            return
        told = f"{name} {place.removeprefix(self._root)}"
        is_stop = isinstance(self._stop, str) and told.startswith(self._stop)
        if self._is_dead or is_stop or len(self.log) == self._stop:
            self._is_dead = True
            if self._kill is not None:
                self._kill()
            raise KilledError
        self.log.append(told)

    def _wrapped(self, name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            self.call(name, path, kwargs.get("dir_fd"))
            # A process that is killed keeps what it wrote, flushed or not; thousands of flushes take minutes.
            return None if name == "fsync" else original(path, *args, **kwargs)

        return call

    def _os_open(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                self.call("create", path, kwargs.get("dir_fd"))
            return original(path, flags, *args, **kwargs)

        return call

    def _opening(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "r" in mode:
                return original(file, mode, *args, **kwargs)
            if not isinstance(file, int):
                self.call("create", file)
            return _File(original(file, mode, *args, **kwargs), self, _resolved(file))

        return call


class _File:
    """A file open for writing: its first write and its closing are calls, whatever is buffered between."""

    def __init__(self, file: Any, disk: Disk, path: str) -> None:
        self._file, self._disk, self._path = file, disk, path
        self._is_written = False

    def write(self, data: Any) -> int:
        if not self._is_written or self._disk.is_dead:
            self._is_written = True
            try:
                self._disk.call("write", self._path)
            except KilledError:
                self._file.write(data[: len(data) // 2])
                self._file.flush()
                raise
        return int(self._file.write(data))

    def close(self) -> None:
        if self._file.closed:
            return
        try:
            self._disk.call("close", self._path)
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _resolved(path: Any, dir_fd: int | None = None) -> str:
    """Absolute, also where a call names a directory by its descriptor."""
    if isinstance(path, int):
        return str(Path(f"/proc/self/fd/{path}").readlink())
    above = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
    return str(above / os.fspath(path))
