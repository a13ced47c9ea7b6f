"""A server as all connections of a worker to it see it: where it is, and what it may still lose.

What a server was sent and has not yet written down is kept here. A server that takes its place is sent all
that again, by whichever connection finds it first; the others wait for that and continue there.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from torch import Tensor

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.outages import Silences, num_pushes
from ridgeline.runtime.kvstore.serving.worker.patience import Company, Patience

_log = logging.getLogger(__name__)
KEPT_BYTES = 1 << 29
"""What a worker keeps for one server before it waits for a snapshot, or `KEPT_TIMES` its values there: more
than a server takes between two snapshots, and while it writes one."""
KEPT_TIMES = 4


@dataclass(slots=True)
class Kept:
    """A call that changes something.

    Attributes:
        body: What was asked.
        frames: What came with it.
        begun: How many snapshots had begun when it was done: later ones hold it. None: it is not answered.
    """

    body: wire.Init | wire.Push | wire.PushRows
    frames: tuple[Tensor, ...]
    begun: int | None = None

    @property
    def num_bytes(self) -> int:
        """Of the frames."""
        return sum(frame.nbytes for frame in self.frames)


class Peer:
    """A server, of whatever epoch.

    Args:
        found: As far as is known.
        look: Reports a server that has taken its place.
        barriers: How many barriers the worker has passed there.
        is_part: What this one keeps is not all that the worker has sent.
        company: Of the worker; see `Patience`.

    Attributes:
        found: The server that connections are to go to.
        barriers: As above.
        is_part: As above.
        writes: Whether the server writes snapshots; None: it has not said so yet.
        least_bytes: What may be kept, at least, before a snapshot is waited for.
        silences: When it was not heard of.
        patience: With which it is waited for.
    """

    def __init__(
        self,
        found: FoundServer,
        look: Callable[[], FoundServer | None] = lambda: None,
        barriers: int = 0,
        *,
        is_part: bool = False,
        company: Company | None = None,
    ) -> None:
        self.found = found
        self.barriers = barriers
        self.is_part = is_part
        self.writes: bool | None = None
        self.least_bytes = KEPT_BYTES
        self.silences = Silences()
        self.patience = Patience(company)
        self._value_bytes = 0
        self._look = look
        self._kept: dict[tuple[ValueSlot, int], Kept] = {}
        self._kept_bytes = 0
        self._counts: dict[ValueSlot, int] = {}
        self._lock = threading.RLock()
        self._is_blind = False

    @property
    def is_full(self) -> bool:
        """Whether a snapshot has to be waited for."""
        return self._kept_bytes > max(self.least_bytes, KEPT_TIMES * self._value_bytes)

    def numbered(self, body: Body) -> Body:
        """A push with its number; other calls as they are. Pushes to a slice come one after the other."""
        if not isinstance(body, wire.Push | wire.PushRows) or body.number:
            return body
        # By slice and not by connection: several threads push, and a push outlives its connection.
        number = self._counts[body.slot] = self._counts.get(body.slot, 0) + 1
        return msgspec.structs.replace(body, number=number)

    def sent(self, body: Body, frames: tuple[Tensor, ...]) -> None:
        """Keep what the server may lose; the frames are not changed."""
        if self.writes is False or not isinstance(body, wire.Init | wire.Push | wire.PushRows):
            return
        with self._lock:
            kept = self._kept.setdefault(_name(body), Kept(body, frames))
            self._kept_bytes += kept.num_bytes if kept.body is body else 0

    def answered(self, worker: int, body: Body, answer: Answer) -> None:
        """Forget what the server has written down."""
        if isinstance(body, wire.Know) and not answer.error:
            self._value_bytes += body.shape.num_bytes()
            come = answer.versions.get(worker, 0)
            self._counts[body.slot] = max(come, self._counts.get(body.slot, 0))
        if isinstance(body, wire.Barrier):
            self.barriers += 1
        if self.writes is False:
            return
        with self._lock:
            # Each answer says so, since a server that takes the place may be of another kind.
            self.writes = answer.durable >= 0
            if isinstance(body, wire.Init | wire.Push | wire.PushRows):
                kept = self._kept.get(_name(body))
                if (
                    kept is not None
                ):  # else it was done again for a server that took this one's place
                    kept.begun = max(answer.begun, kept.begun or 0)
            self._forget(answer.durable)

    def newest(self, told: FoundServer) -> FoundServer:
        """The newest server that anybody knows of.

        Args:
            told: What a server has said itself.
        """
        try:
            seen = self._look()
        except RuntimeError as error:
            if not self._is_blind:
                _log.warning("servers that replace others are not announced: %s", error)
            self._is_blind = True
            seen = None
        return max(self.found, told, seen or told, key=lambda found: found.epoch)

    def follow(self, found: FoundServer, send: Callable[["Peer", list[Kept]], None]) -> int:
        """Have a newer server take the place of this one; nothing is done where another connection has.

        Args:
            found: The newer one.
            send: Sends what is kept to another peer, which keeps it in turn.

        Returns:
            How many pushes were sent again.
        """
        with self._lock:
            if self.found.epoch >= found.epoch:
                return 0
            there = Peer(
                found, self._look, self.barriers, is_part=True, company=self.patience.company
            )
            kept = [*self._kept.values()]
            send(there, kept)
            self.found, self.writes = there.found, there.writes
            self._kept, self._kept_bytes = there._kept, there._kept_bytes
        return num_pushes([one.body for one in kept])

    def _forget(self, durable: int) -> None:
        for name, kept in [*self._kept.items()]:
            # In the order in which they were sent: behind the first that may be lost, none is forgotten.
            if durable >= 0 and (kept.begun is None or kept.begun >= durable):
                break
            self._kept_bytes -= kept.num_bytes
            del self._kept[name]


def _name(body: wire.Init | wire.Push | wire.PushRows) -> tuple[ValueSlot, int]:
    return body.slot, 0 if isinstance(body, wire.Init) else body.number
