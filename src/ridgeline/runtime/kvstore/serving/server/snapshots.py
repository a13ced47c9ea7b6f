"""When a server writes down what it holds, and how workers learn of that.

A snapshot is a copy, taken between two calls, that a thread writes. A push that is done after so many had
begun is in the next one. Workers keep what they pushed until that is written.
"""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from safetensors import SafetensorError

from ridgeline.errors import KVStoreError, first_line
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import Claim
from ridgeline.runtime.kvstore.serving.server.images import (
    Image,
    image_of,
    read_image,
    restore,
    write_image,
)
from ridgeline.runtime.kvstore.serving.server.shard import Shard

EVERY_BYTES = 1 << 28
"""Of pushes between two snapshots; more where a snapshot is larger: no more is written than comes in."""
EVERY_S = 5.0
"""Between two snapshots, where something was pushed; more where one takes longer than a tenth of that."""

_log = logging.getLogger(__name__)


class Snapshots:
    """The snapshots of one server.

    Args:
        folder: Where they are; made where it is missing. The newest one in it is what the server begins with.
        shard: Empty.
        every_bytes: Of pushes between two.
        every_s: Seconds between two.

    Attributes:
        begun: How many have begun.
        durable: Up to which all are written.
        epoch: Of the server; see `Claim`.
        failed: Why the last one was not written; empty where it was.

    Raises:
        KVStoreError: the folder cannot be made, or holds what is no snapshot of such a server.
    """

    def __init__(
        self, folder: Path, shard: Shard, every_bytes: int = EVERY_BYTES, every_s: float = EVERY_S
    ) -> None:
        self._folder, self._shard = folder, shard
        self._every_bytes, self._every_s = every_bytes, every_s
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise KVStoreError(
                f"wanted a folder for snapshots, got {folder}: {error.strerror}; name another one"
            ) from error
        # Before the newest one is read: from here on the server before this one writes none that counts.
        self._claim = Claim(folder)
        self.epoch = self._claim.epoch
        self.begun = self.durable = self._restored()
        self.failed = ""
        self._bytes = self._held_bytes = 0
        self._is_wanted = self._is_changed = False
        self._begun_s = time.monotonic()
        self._took_s = 0.0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvstore-snapshot")
        self._writing: Future[None] | None = None

    @property
    def is_superseded(self) -> bool:
        """Whether another server has taken this one's place. Cost: reads a file."""
        return not self._claim.is_newest

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._writing is not None

    def count(self, body: wire.Body, num_bytes: int) -> None:
        """A call was done."""
        changes = wire.Init | wire.Push | wire.PushRows | wire.Leave
        if isinstance(body, changes):
            self._is_changed = True
            self._bytes += num_bytes

    def want(self) -> int:
        """Have one begin soon that holds all that was done; the number from which on they do."""
        self._is_wanted = True
        return self.begun + 1

    def turn(self) -> None:
        """Take notice of one that is written, and begin one that is due."""
        if self._writing is not None:
            if not self._writing.done():
                return
            self._finish(self._writing)
            self._writing = None
        if self._is_wanted or (self._is_changed and self._is_due):
            self._begin()

    def close(self, *, writes: bool) -> None:
        """Write what has changed since the last one, if it is to be kept."""
        if self._writing is not None:
            self._writing.exception()
            self.turn()
        if writes and self._is_changed and self._writing is None:
            self._begin()
        self._writer.shutdown(wait=True)
        if self._writing is not None:
            self._finish(self._writing)

    @property
    def _is_due(self) -> bool:
        if self._bytes >= max(self._every_bytes, self._held_bytes):
            return True
        return time.monotonic() - self._begun_s >= max(self._every_s, 10 * self._took_s)

    def _begin(self) -> None:
        self._is_wanted = self._is_changed = False
        # Set back before it is written: what comes meanwhile belongs to the next one.
        self._bytes, self._begun_s = 0, time.monotonic()
        self.begun += 1
        try:
            image = image_of(self._shard, self.begun)
        except KVStoreError as error:
            # As if writing had failed, so that those who wait for it are told the same way.
            self._writing = Future()
            self._writing.set_exception(error)
            return
        self._held_bytes = sum(tensor.nbytes for tensor in image.tensors.values())
        self._writing = self._writer.submit(self._write, image)

    def _write(self, image: Image) -> None:
        began_s = time.monotonic()
        path = self._folder / f"{self.epoch:08d}-{image.number:012d}.safetensors"
        write_image(image, path)
        # Only now: a server that comes later finds this one, and workers may forget what it holds.
        if self.is_superseded:
            raise KVStoreError(
                f"wanted to be the only server that writes snapshots to {self._folder}, got another one that "
                "has taken the place of this one"
            )
        # Old ones last, so that there is a whole one at every moment.
        for other in _files(self._folder):
            if other < path:
                other.unlink(missing_ok=True)
        self._took_s = time.monotonic() - began_s

    def _finish(self, writing: "Future[None]") -> None:
        error = writing.exception()
        if error is None:
            self.durable, self.failed = self.begun, ""
            return
        if not isinstance(error, OSError | SafetensorError | KVStoreError):
            raise error
        self._is_changed = True
        self.failed = str(error) if isinstance(error, KVStoreError) else _told(error, self._folder)
        _log.error("a snapshot was not written: %s", self.failed)

    def _restored(self) -> int:
        """Begin with the newest snapshot; a server that takes the place of one that wrote none awaits all."""
        for part in self._folder.glob("*.part"):
            part.unlink(missing_ok=True)
        found = _files(self._folder)
        if found:
            image = read_image(found[-1])
            restore(self._shard, image)
            return image.number
        if self.epoch > 1:
            self._shard.awaits = set(self._shard.slots.present)
        return 0


def _files(folder: Path) -> list[Path]:
    """Snapshots, the newest last: those of later servers come after all of those before."""
    return sorted(folder.glob("*.safetensors"))


def _told(error: BaseException, folder: Path) -> str:
    return (
        f"wanted to write a snapshot to {folder}, got {first_line(error)}; make sure that it has room, for "
        "workers wait once they keep too much"
    )
