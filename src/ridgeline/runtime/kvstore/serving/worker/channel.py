"""A worker's connection to one server: calls in order, each done once, whatever is lost on the way.

A channel is used by one thread. Calls that are not answered in time are sent again, from the first of them
on; where another server has taken the place of the one that was asked, to that one (`Peer`).
"""

import logging
import time
from collections.abc import Sequence

import msgspec
import zmq
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.addresses import host_identity
from ridgeline.runtime.kvstore.serving.addressing.entry import Entrance
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.addressing.keys import Keys
from ridgeline.runtime.kvstore.serving.segment import Segment, SharedPlaces
from ridgeline.runtime.kvstore.serving.slices import Answered, Asked
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, Call
from ridgeline.runtime.kvstore.serving.worker.outages import (
    Silence,
)
from ridgeline.runtime.kvstore.serving.worker.peer import Kept, Peer

RESEND_S = 2.0
"""How long an answer may take before calls are sent again."""
LOOK_S = 0.25
"""How often it looks for another server, where an answer takes longer."""
SILENCE_S = 30.0
"""How long a server may say nothing at all."""
PARKED_S = 1800.0
"""How long a call may wait for other workers. Source: torch.distributed, the default of gloo."""
ALIVE_S = 2.0
"""How often ZeroMQ asks whether the other end is there; five times in vain, and it connects again. TCP alone
would notice after minutes that a host was cut off."""
WINDOW = 16
"""Calls that may be under way on one connection."""
MOST_UNDER_WAY = 1 << 24
"""Bytes of tensors in these calls, and of memory that is shared.

Source: 64 MiB in slices of 4 MiB, two cores, 15 ms with four times as much and 12 with this, which stays in
caches. On slow links more would take longer than `RESEND_S`."""
LEAST_SHARED = 1 << 14
"""Bytes of a tensor that goes through shared memory: smaller ones cost more there."""

_log = logging.getLogger(__name__)


class Connection:
    """A connection.

    Args:
        context: Of all sockets of the process.
        server: Its address, or what all connections of the worker to it know of it.
        worker: This worker's number.
        channel: Which of its connections to this server.
        silence_s: How long the server may say nothing at all.
        resend_s: How long an answer may take before calls are sent again.
        parked_s: How long a call may wait for other workers.
        keys: Of workers; None for servers that ask for none.

    Attributes:
        socket: Where answers come; another one once another server is asked.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        server: str | Peer,
        worker: int,
        channel: int,
        silence_s: float = SILENCE_S,
        resend_s: float = RESEND_S,
        parked_s: float = PARKED_S,
        keys: Keys | None = None,
    ) -> None:
        self._context = context
        self._peer = server if isinstance(server, Peer) else Peer(FoundServer(0, server))
        self._worker = worker
        self._channel = channel
        self._silence_s = silence_s
        self._resend_s = resend_s
        self._parked_s = parked_s
        self._keys = keys
        self._at = self._peer.found
        self._told = self._at.epoch
        self._heard_s = time.monotonic()
        """When the server, or that it is to be waited for, was heard of last."""
        self._connect()
        self._segment: Segment | None = None
        self._room = SharedPlaces(MOST_UNDER_WAY)
        self._places: dict[int, int] = {}
        self._shares = True
        self._num_asked = 0
        self._awaits: dict[int, tuple[int, ...]] = {}
        """Of calls that wait for other workers: for whom."""
        self._unsent: list[tuple[int, Asked]] = []
        self._num_sent = 0
        self._under_way: dict[int, tuple[int, Asked]] = {}
        """By their number on this connection; with each, which of all that was asked it is."""
        self._found: dict[int, Answered] = {}

    def start(self, asked: Sequence[Asked]) -> range:
        """Send calls, as many as the window holds; the numbers to `finish` with.

        Raises:
            KVStoreError: as `queue`.
        """
        numbers = self.queue(asked)
        self._send_some()
        return numbers

    def queue(self, asked: Sequence[Asked]) -> range:
        """As `start`, but none is sent before `send_next`, or `finish`.

        Raises:
            KVStoreError: as `finish`, where calls before these are to be finished first.
        """
        if not self._under_way:
            self._heard_s = time.monotonic()
        self._move()
        if self._shares and any(one.num_shared >= LEAST_SHARED for one in asked):
            self._share()
        numbers = range(self._num_asked + 1, self._num_asked + 1 + len(asked))
        self._num_asked += len(asked)
        bodies = [self._peer.numbered(one.body) for one in asked]
        asked = [one._replace(body=body) for one, body in zip(asked, bodies, strict=True)]
        self._unsent += zip(numbers, asked, strict=True)
        return numbers

    def send_next(self) -> bool:
        """Send the next of the calls that wait for it; whether there was one and the window held it."""
        if not self._unsent or not self._may_send(self._unsent[0][1]):
            return False
        which, asked = self._unsent.pop(0)
        place = self._place_for(asked)
        self._peer.sent(asked.body, asked.frames)
        self._num_sent = number = self._num_sent + 1
        self._under_way[number] = which, asked
        if self._segment is not None and place is not None:
            self._places[number] = place
            for frame in map(wire.frame_of, asked.frames):
                self._segment.part(place, len(frame))[:] = frame
        self._send(number, asked)
        return True

    def is_answered(self, numbers: range) -> bool:
        """Whether nothing is left to wait for."""
        return all(number in self._found for number in numbers)

    def take_answers(self) -> None:
        """Receive what has come, and send what the window holds then.

        Raises:
            KVStoreError: the server refused a message.
        """
        self._tell_of_outage()
        while self.socket.poll(0):
            self._receive()
            self._send_some()

    def finish(self, numbers: range) -> list[Answered]:
        """The answers to calls that were started.

        Raises:
            KVStoreError: the server refused one (the others are done all the same), does not let this worker
                in, or says nothing, or other workers that a call waits for do not come.
        """
        self._wait(numbers)
        answers = [self._found.pop(number) for number in numbers]
        refused = next((one.answer.error for one in answers if one.answer.error), "")
        if refused:
            raise KVStoreError(refused)
        return answers

    def ask(self, body: Body, *frames: Tensor) -> Answered:
        """One call, and its answer.

        Raises:
            KVStoreError: as `finish`.
        """
        (answered,) = self.finish(self.start([Asked(body, frames)]))
        return answered

    def signal(self, body: Body) -> None:
        """A call whose answer is not waited for; one that is not answered yet is sent again instead.

        Raises:
            KVStoreError: the server has refused it, or does not let this worker in.
        """
        while self.socket.poll(0):
            self._receive()
        self._entrance.check()
        self._found.clear()
        if self._entrance.is_lost:
            self._follow()
        if not self._under_way:
            self.start([Asked(body)])
        elif not self._follow():
            for number, (_, asked) in self._under_way.items():
                self._send(number, asked)

    def make_room(self) -> None:
        """Wait for a snapshot of the server, where the worker keeps too much of what it may lose.

        Raises:
            KVStoreError: as `finish`; or no snapshot can be written.
        """
        if self._peer.is_full:
            self.ask(wire.Cover())

    def close(self) -> None:
        """Release the connection."""
        self._entrance.close()
        self.socket.close(linger=0)

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * ALIVE_S))
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(5000 * ALIVE_S))
        self._entrance = Entrance(self.socket, self._at.address, self._keys)
        self.socket.connect(self._at.address)

    def _wait(self, numbers: range) -> None:
        """Until all are answered."""
        self._heard_s = sent_s = begun_s = time.monotonic()
        while not self.is_answered(numbers):
            if self.socket.poll(int(1000 * min(self._resend_s, self._silence_s, LOOK_S))):
                self._tell_of_outage()
                self._receive()
                self._send_some()
            else:
                self._entrance.check()
            now = time.monotonic()
            is_late = now - self._heard_s >= self._resend_s
            looks = is_late or self._entrance.is_lost or self._told > self._at.epoch
            if looks and self._follow():
                sent_s = now
            if self.is_answered(numbers):  # at the last moment: nobody is missing
                return
            self._check_patience(now - begun_s, now - self._heard_s)
            if is_late and now - sent_s >= self._resend_s:
                sent_s = now
                for number, (_, asked) in self._under_way.items():
                    self._send(number, asked)

    def _check_patience(self, asked_s: float, silent_s: float) -> None:
        address, patience = self._at.address, self._peer.patience
        patience.check_heard(address, silent_s, self._silence_s)
        calls = {type(one.body).__name__ for _, one in self._under_way.values()}
        awaits = {worker for number in self._under_way for worker in self._awaits.get(number, ())}
        patience.check_came(address, self._worker, calls, asked_s, self._parked_s, awaits)

    def _follow(self) -> bool:
        """Go to a server that has taken the place of the one that was asked, where there is one."""
        pushes, found = 0, self._peer.newest(FoundServer(self._told, self._at.address))
        if found.epoch > self._peer.found.epoch:
            pushes = self._peer.follow(found, self._send_again)
        return self._move(pushes)

    def _send_again(self, there: Peer, kept: Sequence[Kept]) -> None:
        """Send what another server may have lost; what is refused was refused before."""
        number = there.found.epoch << 32 | self._channel
        seconds = self._silence_s, self._resend_s, self._parked_s
        channel = Connection(self._context, there, self._worker, number, *seconds, self._keys)
        asked = [Asked(wire.Again(there.barriers)), *(Asked(one.body, one.frames) for one in kept)]
        if not self._peer.is_part:
            asked.append(Asked(wire.Whole()))
        try:
            channel._wait(channel.start(asked))
        finally:
            channel.close()

    def _move(self, pushes: int = 0) -> bool:
        """Ask the newer server, where there is one, what the other one has not answered.

        Args:
            pushes: That it has been sent again.
        """
        if self._peer.found is self._at:
            return False
        self.close()
        old, self._at, now = self._at, self._peer.found, time.monotonic()
        is_another = old.epoch > 0 or old.address != self._at.address  # else it has said who it is
        if is_another:  # who has not asked meanwhile has not waited, and tells of it all the same
            began_s = self._heard_s if pushes or self._under_way else now
            silence = Silence(began_s, now, self._at.address, pushes, is_replaced=True)
            self._peer.silences.add(silence)
        self._heard_s = now
        self._told = max(self._told, self._at.epoch)
        self._unsent[:0] = self._under_way.values()
        self._under_way.clear()
        self._places.clear()
        self._awaits.clear()
        self._num_sent = 0
        self._segment, self._shares = None, True
        self._connect()
        self._send_some()
        return True

    def _send_some(self) -> None:
        while self.send_next():
            pass

    def _may_send(self, asked: Asked) -> bool:
        """Whether there is room for one more call, and its tensors, beside those under way."""
        under_way = [one for _, one in self._under_way.values()]
        num_bytes = asked.num_bytes + sum(one.num_bytes for one in under_way)
        return not under_way or (len(under_way) < WINDOW and num_bytes <= MOST_UNDER_WAY)

    def _place_for(self, asked: Asked) -> int | None:
        """Where its tensor goes in shared memory; None where it is sent, as where no room is large enough."""
        if self._segment is None or asked.num_shared < LEAST_SHARED:
            return None
        return self._room.take(asked.num_shared)

    def _send(self, number: int, asked: Asked) -> None:
        call = Call(self._worker, self._channel, number, asked.body, epoch=self._at.epoch)
        frames = [*map(wire.frame_of, asked.frames)]
        if number in self._places:
            length = sum(map(len, frames))
            place = self._places[number]
            call = msgspec.structs.replace(call, place=place, length=length, room=asked.room)
            frames.clear()
        # Copied: pyzmq frees what is not by a thread of its own, which cannot be ended.
        self.socket.send_multipart([wire.encode(call), *frames])

    def _share(self) -> None:
        """Make memory that the server shares, where the system has some."""
        self._shares = False
        try:
            segment = Segment.make(MOST_UNDER_WAY)
        except OSError as error:
            _log.info("tensors go through sockets, since memory cannot be shared: %s", error)
            return
        try:
            is_shared = self.ask(wire.Share(segment.name, host_identity())).answer.is_shared
        finally:
            segment.forget_name()
        if not is_shared:
            _log.info("tensors go through sockets, since %s is on another host", self._at.address)
            return
        self._segment = segment
        self._shares = False  # also where this was asked of another server in the end
        self._room = SharedPlaces(MOST_UNDER_WAY)

    def _tell_of_outage(self) -> None:
        """The server is there, and was not for long."""
        bodies = [one.body for _, one in self._under_way.values()]
        self._peer.silences.heard_again(self._heard_s, self._at.address, self._worker, bodies)

    def _receive(self) -> None:
        self._heard_s = time.monotonic()
        self._peer.patience.heard()
        frames = self.socket.recv_multipart(copy=False)
        answer = wire.decode_answer(frames[0].buffer)
        if not answer.number:
            raise KVStoreError(
                f"the server at {self._at.address} refused a message: {answer.error}"
            )
        self._told = max(self._told, answer.epoch)
        is_expected = answer.number in self._under_way and answer.epoch == self._at.epoch
        if not is_expected:
            return
        if answer.is_parked:
            self._awaits[answer.number] = answer.awaits
            return
        if self._awaits.pop(answer.number, ()):
            self._peer.patience.came()
        which, asked = self._under_way[answer.number]
        self._peer.answered(self._worker, asked.body, answer)
        tensor = self._tensor(answer, [frame.buffer for frame in frames[1:]])
        if asked.take is not None and tensor is not None:
            asked.take(tensor)
            tensor = None
        elif answer.is_shared and tensor is not None:
            tensor = tensor.clone()
        self._found[which] = Answered(answer, tensor)
        del self._under_way[answer.number]
        if answer.number in self._places:
            self._room.give(self._places.pop(answer.number))

    def _tensor(self, answer: Answer, frames: Sequence[memoryview]) -> Tensor | None:
        if answer.shape is None:
            return None
        if answer.is_shared:
            assert self._segment is not None, "no server knows a place otherwise"
            num_bytes = answer.shape.num_bytes()
            frames = [self._segment.part(self._places[answer.number], num_bytes)]
        (tensor,) = wire.tensors_of(frames, [answer.shape])
        return tensor
