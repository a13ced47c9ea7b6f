"""When a worker did not hear of a server: what each of its connections has seen of that, put together."""

import datetime
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.errors import KVStoreError
from ridgeline.history import Outage
from ridgeline.runtime.kvstore.serving import wire


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


def check_heard(address: str, silent_s: float, most_s: float) -> None:
    """Refuse to wait for a server for ever.

    Args:
        address: Of the server.
        silent_s: How long nothing was heard of it.
        most_s: How long that may be.

    Raises:
        KVStoreError: it was longer.
    """
    if silent_s > most_s:
        raise KVStoreError(
            f"wanted an answer of the server at {address}, got none for {silent_s:.0f} s; check whether it "
            "runs"
        )


def nobody_came(address: str, worker: int, calls: Sequence[str], asked_s: float) -> KVStoreError:
    """What is raised where other workers do not come to what this one waits for.

    Args:
        address: Of the server.
        worker: That waits.
        calls: Kinds of the calls that are not answered.
        asked_s: How long it has waited.
    """
    waiting = ", ".join({*calls})
    return KVStoreError(
        f"wanted other workers to come to what worker {worker} waits for ({waiting}) at {address}, got none "
        f"for {asked_s:.0f} s; make sure that all make the same calls of init and barrier, and push"
    )
