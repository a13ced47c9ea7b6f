"""The black box: what a worker was doing, readable after it was killed.

A small file that is mapped into memory; the kernel keeps what was written to it however the process
ended. One record: step, time, and the name of the frame that began last. A write is one copy of 64
bytes, about a microsecond, without a system call.
"""

import mmap
import struct
import time
from pathlib import Path

from ridgeline.codec import Value
from ridgeline.errors import FileFormatError

_MAGIC = b"rlbox001"
_RECORD = struct.Struct("<8sqq40s")
SIZE = _RECORD.size
_NAME_LENGTH = 40


class Moment(Value, frozen=True, kw_only=True):
    """Where a worker was: in `frame` of `step` since `time_ns` (nanoseconds since the epoch)."""

    step: int
    frame: str
    time_ns: int


class BlackBox:
    """Writes this worker's moments to a file, which it makes anew; `frame` fits `Recorder.listener`.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Full size first: Python refuses to map more than the file has.
        path.write_bytes(bytes(SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._step = -1
        self.frame("start")

    def step(self, step: int) -> None:
        """The given step begins."""
        self._step = step
        self.frame("step")

    def frame(self, name: str) -> None:
        """A frame of the current step begins."""
        record = _RECORD.pack(_MAGIC, self._step, time.time_ns(), name.encode()[:_NAME_LENGTH])
        self._map[:] = record

    def close(self) -> None:
        """Unmap the file, which stays."""
        self._map.close()


def read_moment(path: Path) -> Moment | None:
    """The last moment in a black box; None where none was written.

    Raises:
        FileFormatError: the file is no black box.
        OSError: the file cannot be read.
    """
    if not path.exists():
        return None
    data = path.read_bytes()
    # Made, but ended before the first record: zeros are no fault of the file.
    if data == bytes(SIZE):
        return None
    if len(data) != SIZE or not data.startswith(_MAGIC):
        raise FileFormatError(
            f"wanted a black box of {SIZE} bytes, got {len(data)} bytes of something else in {path}; "
            "delete it"
        )
    _, step, time_ns, name = _RECORD.unpack(data)
    return Moment(
        step=step, frame=name.rstrip(b"\0").decode("utf-8", errors="replace"), time_ns=time_ns
    )
