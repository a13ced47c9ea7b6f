"""A worker's connections to all servers: some for each thread that asks, and those that say it is there."""

import threading
from collections.abc import Sequence

import zmq

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.channel import Answered, Asked, Channel
from ridgeline.runtime.kvstore.serving.keys import Keys
from ridgeline.runtime.kvstore.serving.slices import Located


class Connections:
    """Asks servers, from any thread.

    Args:
        addresses: Of the servers.
        worker: This worker's number.
        beat_s: How often it says that it is there.
        keys: Of workers; None for servers that ask for none.
    """

    def __init__(
        self, addresses: Sequence[str], worker: int, beat_s: float, keys: Keys | None = None
    ) -> None:
        self.num_servers = len(addresses)
        self._addresses = [*addresses]
        self._worker = worker
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._opened: list[Channel] = []
        self._num_channels = 0
        self._beat_s = beat_s
        self._ends = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="kvstore-beat", daemon=True)
        self._beating.start()

    def ask(self, calls: Sequence[Located]) -> list[Answered]:
        """Ask all at once, each server in order; the answers in the order of the calls.

        Raises:
            KVStoreError: a server refused a call, or says nothing.
        """
        channels = self._channels()
        started = [
            channel.start([call.asked for call in calls if call.place == place])
            for place, channel in enumerate(channels)
        ]
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
        return self.ask([Located(place, Asked(body)) for place in range(self.num_servers)])

    def close(self) -> None:
        """Tell the servers that this worker is done.

        Raises:
            KVStoreError: a server says nothing; the connections are released all the same.
        """
        self._ends.set()
        self._beating.join()
        try:
            self.tell_all(wire.Leave())
        finally:
            for channel in self._opened:
                channel.close()
            self._context.term()

    def _channels(self) -> list[Channel]:
        """Of this thread, one to each server."""
        if not hasattr(self._local, "channels"):
            self._local.channels = self._open()
        channels: list[Channel] = self._local.channels
        return channels

    def _open(self) -> list[Channel]:
        with self._lock:
            self._num_channels += 1
            made = [
                Channel(self._context, one, self._worker, self._num_channels, keys=self._keys)
                for one in self._addresses
            ]
            self._opened += made
        return made

    def _beat(self) -> None:
        channels = self._open()
        try:
            while not self._ends.wait(self._beat_s):
                for channel in channels:  # none waits for another, whose server may be cut off
                    channel.signal(wire.Beat())
        except KVStoreError:  # who waits for an answer of this server says so
            return
