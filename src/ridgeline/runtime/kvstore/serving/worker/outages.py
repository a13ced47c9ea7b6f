"""When a worker did not hear of a server: what each of its connections has seen of that, put together."""

import datetime
import logging
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.history import Outage
from ridgeline.runtime.kvstore.serving import wire

OUTAGE_S = 5.0
"""How long a server may say nothing before the log reports it, once it is heard of again."""

_log = logging.getLogger(__name__)


class Silence(NamedTuple):
    """A time without a word.

    Attributes:
        began_s: By the monotonic clock.
        ended_s: Likewise.
        address: Of the server that was heard of then.
        pushes: Sent again.
        is_replaced: It is another server.
    """

    began_s: float
    ended_s: float
    address: str
    pushes: int
    is_replaced: bool


def _is_one(last: Silence, new: Silence) -> bool:
    """Whether both report the same: they overlap, or one connection heard later of who took over."""
    is_overlapping = last.ended_s >= new.began_s
    return is_overlapping or (last.is_replaced and new.is_replaced and last.address == new.address)


class Silences:
    """Those of one server, in order; no two of them overlap, or are of the same replacement."""

    def __init__(self) -> None:
        self._all: list[Silence] = []
        self._lock = threading.Lock()

    def add(self, new: Silence) -> None:
        """A connection has heard of the server again; others may have waited meanwhile, too."""
        with self._lock:
            while self._all and _is_one(self._all[-1], new):
                last = self._all.pop()
                new = Silence(
                    min(last.began_s, new.began_s),
                    max(last.ended_s, new.ended_s),
                    new.address,
                    last.pushes + new.pushes,
                    last.is_replaced or new.is_replaced,
                )
            self._all.append(new)

    def heard_again(
        self, began_s: float, address: str, worker: int, calls: Sequence[wire.Body]
    ) -> None:
        """The server is there, and the log says so where it was not for long.

        Args:
            began_s: When it was heard of before.
            address: Where it is.
            worker: That waited.
            calls: With which.
        """
        now_s = time.monotonic()
        if now_s - began_s <= OUTAGE_S:
            return
        _log.warning(
            "the server at %s did not answer for %.1f s and answers again; worker %d waited with %d calls",
            address,
            now_s - began_s,
            worker,
            len(calls),
        )
        self.add(Silence(began_s, now_s, address, num_pushes(calls), is_replaced=False))

    def all(self) -> list[Silence]:
        """Those so far."""
        with self._lock:
            return [*self._all]

    def outages(
        self, worker: int, server: int, *, wall_s: float | None = None, now_s: float | None = None
    ) -> list[Outage]:
        """What there is to report about them.

        Args:
            worker: Whose connections these are.
            server: Of which one.
            wall_s: By the clock on the wall; None: now.
            now_s: The same moment by the monotonic clock; None: now.
        """
        wall_s = time.time() if wall_s is None else wall_s
        now_s = time.monotonic() if now_s is None else now_s
        return [
            Outage(
                worker=worker,
                server=server,
                address=one.address,
                began_at=_moment(wall_s - now_s + one.began_s),
                lasted_s=one.ended_s - one.began_s,
                pushes_again=one.pushes,
                is_replaced=one.is_replaced,
            )
            for one in self.all()
        ]


def num_pushes(bodies: Sequence[wire.Body]) -> int:
    """How many of these calls are pushes."""
    return sum(isinstance(body, wire.Push | wire.PushRows) for body in bodies)


def _moment(wall_s: float) -> str:
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC).isoformat(timespec="seconds")
