"""A worker's connections to all servers: some for each thread that asks, and those that say it is there."""

import secrets
import threading
from collections.abc import Sequence
from functools import partial

import zmq

from ridgeline.errors import KVStoreError
from ridgeline.history import Outage
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer, Notice
from ridgeline.runtime.kvstore.serving.addressing.keys import Keys
from ridgeline.runtime.kvstore.serving.slices import Answered, Asked
from ridgeline.runtime.kvstore.serving.worker.channel import (
    LOOK_S,
    PARKED_S,
    SILENCE_S,
    Connection,
)
from ridgeline.runtime.kvstore.serving.worker.patience import Company
from ridgeline.runtime.kvstore.serving.worker.peer import Peer


class Connections:
    """Asks servers, from any thread.

    Args:
        addresses: Of the servers.
        worker: This worker's number.
        beat_s: How often it says that it is there.
        keys: Of workers; None for servers that ask for none.
        notice: Reports servers that take the place of these.
        parked_s: How long a call may wait for other workers; a server is silent no longer than that, either.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        worker: int,
        beat_s: float,
        keys: Keys | None = None,
        notice: Notice | None = None,
        parked_s: float = PARKED_S,
    ) -> None:
        self.num_servers = len(addresses)
        company = Company()
        self.peers = [
            Peer(
                FoundServer(0, address),
                partial(notice.newest, place) if notice else lambda: None,
                company=company,
            )
            for place, address in enumerate(addresses)
        ]
        self._worker = worker
        self._keys = keys
        self._parked_s = parked_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._opened: list[Connection] = []
        # Others than those of a process that was this worker before, whose calls have these numbers too.
        self._last_channel = secrets.randbits(31)
        self._beat_s = beat_s
        self._ends = threading.Event()
        self._beating = [
            threading.Thread(target=self._beat, args=(place,), name="kvstore-beat", daemon=True)
            for place in range(self.num_servers)
        ]
        for thread in self._beating:
            thread.start()

    @property
    def keeps(self) -> bool:
        """Whether what is pushed may be sent again after it was answered."""
        return any(peer.writes for peer in self.peers)

    def outages(self) -> tuple[Outage, ...]:
        """When servers were not heard of, in order."""
        found = [
            outage
            for place, peer in enumerate(self.peers)
            for outage in peer.silences.outages(self._worker, place)
        ]
        return tuple(sorted(found, key=lambda one: one.began_at))

    def ask(self, calls: Sequence[Asked]) -> list[Answered]:
        """Ask all at once, each server in order; the answers in the order of the calls.

        Raises:
            KVStoreError: a server refused a call, or says nothing.
        """
        channels = self._channels()
        for channel in channels:
            # Before anything is queued: it waits for a snapshot, behind which calls would stand.
            channel.make_room()
        started = [
            channel.queue([call for call in calls if call.place == place])
            for place, channel in enumerate(channels)
        ]
        # In turns, so that no server waits until all that is for another one is sent.
        while sum(channel.send_next() for channel in channels):
            pass
        _take_turns(channels, started)
        answers = [
            iter(channel.finish(numbers))
            for channel, numbers in zip(channels, started, strict=True)
        ]
        return [next(answers[call.place]) for call in calls]

    def tell_all(self, body: wire.Body) -> list[Answered]:
        """Ask every server the same.

        Raises:
            KVStoreError: as `ask`.
        """
        return self.ask([Asked(body, place=place) for place in range(self.num_servers)])

    def close(self) -> None:
        """Notify the servers that this worker is done, but for those that it has waited for in vain.

        Raises:
            KVStoreError: a server says nothing; the connections are released all the same.
        """
        # First, or a beat after the word that it leaves would have the worker counted again.
        self._ends.set()
        for thread in self._beating:
            thread.join()
        try:
            heard = [place for place, peer in enumerate(self.peers) if not peer.patience.is_silent]
            self.ask([Asked(wire.Leave(), place=place) for place in heard])
        finally:
            for channel in self._opened:
                channel.close()
            self._context.term()

    def _channels(self) -> list[Connection]:
        """Of this thread, one to each server."""
        if not hasattr(self._local, "channels"):
            self._local.channels = [self._open(peer) for peer in self.peers]
        channels: list[Connection] = self._local.channels
        return channels

    def _open(self, peer: Peer) -> Connection:
        with self._lock:
            self._last_channel += 1
            made = Connection(
                self._context,
                peer,
                self._worker,
                self._last_channel,
                silence_s=min(SILENCE_S, self._parked_s),
                parked_s=self._parked_s,
                keys=self._keys,
            )
            self._opened.append(made)
        return made

    def _beat(self, place: int) -> None:
        """In a thread for each server: one that is silent does not keep the others from being notified."""
        channel = self._open(self.peers[place])
        try:
            channel.ask(wire.Beat())  # so that it is known, and has a lease
            while not self._ends.wait(self._beat_s):
                channel.signal(wire.Beat())  # its server may be cut off, and come back
        except KVStoreError:  # who waits for an answer of this server says so
            return


def _take_turns(channels: Sequence[Connection], numbers: Sequence[range]) -> None:
    """Take answers from whichever server has one, and send it what is next, until all have answered.

    Where none has anything for a while it is over, too: then each is waited for as `Connection.finish` does,
    which asks again.
    """
    poller = zmq.Poller()
    waits = {}
    for channel, asked in zip(channels, numbers, strict=True):
        if not channel.is_answered(asked):
            poller.register(channel.socket, zmq.POLLIN)
            waits[channel.socket] = channel, asked
    while len(waits) > 1 and (ready := poller.poll(int(1000 * LOOK_S))):
        for socket, _ in ready:
            channel, asked = waits[socket]
            channel.take_answers()
            if channel.is_answered(asked):
                poller.unregister(socket)
                del waits[socket]
