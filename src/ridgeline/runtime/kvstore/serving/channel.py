"""A worker's connection to one server: calls in order, each done once, whatever is lost on the way.

A channel is used by one thread. Calls that are not answered in time are sent again, from the first of them
on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import zmq
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addresses import host_identity
from ridgeline.runtime.kvstore.serving.entry import Entrance
from ridgeline.runtime.kvstore.serving.keys import Keys
from ridgeline.runtime.kvstore.serving.segment import Segment
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, Call

RESEND_S = 2.0
"""How long an answer may take before calls are sent again."""
SILENCE_S = 30.0
"""How long a server may say nothing at all."""
PARKED_S = 1800.0
"""How long a call may wait for other workers. Source: torch.distributed, the default of gloo."""
OUTAGE_S = 5.0
"""How long a server may say nothing before the log tells of it, once it is heard of again."""
ALIVE_S = 2.0
"""How often ZeroMQ asks whether the other end is there; five times in vain, and it connects anew. TCP alone
would notice after minutes that a host was cut off."""
WINDOW = 16
"""Calls that may be under way on one connection."""
LEAST_SHARED, MOST_SHARED = 1 << 14, 1 << 20
"""Bytes of a tensor that goes through shared memory: smaller ones cost more there, larger ones are sent."""

_log = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A call and the tensors that go with it.

    Attributes:
        take: Given the tensor of the answer as it comes, which is not kept then.
        room: Bytes of that tensor, where they are known.
    """

    body: Body
    frames: tuple[Tensor, ...] = ()
    take: Callable[[Tensor], None] | None = None
    room: int = 0

    @property
    def num_shared(self) -> int:
        """Bytes that may lie in shared memory: of its frame or the answer's, where there is just one."""
        sent = [frame.nbytes for frame in self.frames]
        return self.room if not sent else sent[0] if len(sent) == 1 and not self.room else 0


class Answered(NamedTuple):
    """An answer and the tensor that came with it."""

    answer: Answer
    tensor: Tensor | None


class Channel:
    """A connection.

    Args:
        context: Of all sockets of the process.
        address: Of the server.
        worker: This worker's number.
        channel: Which of its connections to this server.
        silence_s: How long the server may say nothing at all.
        resend_s: How long an answer may take before calls are sent again.
        parked_s: How long a call may wait for other workers.
        keys: Of workers; None for servers that ask for none.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        worker: int,
        channel: int,
        silence_s: float = SILENCE_S,
        resend_s: float = RESEND_S,
        parked_s: float = PARKED_S,
        keys: Keys | None = None,
    ) -> None:
        self.address = address
        self._worker = worker
        self._channel = channel
        self._silence_s = silence_s
        self._resend_s = resend_s
        self._parked_s = parked_s
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * ALIVE_S))
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(5000 * ALIVE_S))
        self._entrance = Entrance(self._socket, address, keys)
        self._socket.connect(address)
        self._segment: Segment | None = None
        self._free: list[int] = []
        self._places: dict[int, int] = {}
        self._shares = True
        self._unsent: list[tuple[int, Asked]] = []
        self._under_way: dict[int, Asked] = {}
        self._found: dict[int, Answered] = {}

    def start(self, asked: Sequence[Asked]) -> range:
        """Send calls, as many as the window holds; the numbers to `finish` with."""
        if self._shares and any(one.num_shared >= LEAST_SHARED for one in asked):
            self._share()
        numbers = range(self._number + 1, self._number + 1 + len(asked))
        self._number += len(asked)
        self._unsent += zip(numbers, asked, strict=True)
        self._send_some()
        return numbers

    def finish(self, numbers: range) -> list[Answered]:
        """The answers to calls that were started.

        Raises:
            KVStoreError: the server refused one (the others are done all the same), does not let this worker
                in, or says nothing, or other workers that a call waits for do not come.
        """
        heard_s = sent_s = begun_s = time.monotonic()
        while not all(number in self._found for number in numbers):
            if self._socket.poll(int(1000 * min(self._resend_s, self._silence_s))):
                self._tell_of_outage(time.monotonic() - heard_s)
                heard_s = time.monotonic()
                self._receive()
                self._send_some()
            else:
                self._entrance.check()
            now = time.monotonic()
            if now - heard_s > self._silence_s:
                raise KVStoreError(
                    f"wanted an answer of the server at {self.address}, got none for {now - heard_s:.0f} s; "
                    "see whether it runs"
                )
            if now - begun_s > self._parked_s:
                waiting = ", ".join({type(one.body).__name__ for one in self._under_way.values()})
                raise KVStoreError(
                    f"wanted other workers to come to what worker {self._worker} waits for ({waiting}) at "
                    f"{self.address}, got none for {now - begun_s:.0f} s; see that all make the same "
                    "calls of init and barrier, and push"
                )
            if now - max(heard_s, sent_s) >= self._resend_s:
                sent_s = now
                for number, asked in self._under_way.items():
                    self._send(number, asked)
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
        """A call whose answer nobody waits for; one that is not answered yet is sent again instead.

        Raises:
            KVStoreError: the server has refused it, or does not let this worker in.
        """
        while self._socket.poll(0):
            self._receive()
        self._entrance.check()
        self._found.clear()
        if not self._under_way:
            self.start([Asked(body)])
        else:
            for number, asked in self._under_way.items():
                self._send(number, asked)

    def close(self) -> None:
        """Release the connection."""
        self._entrance.close()
        self._socket.close(linger=0)

    def _send_some(self) -> None:
        while self._unsent and len(self._under_way) < WINDOW:
            number, asked = self._unsent.pop(0)
            self._under_way[number] = asked
            if self._segment is not None and LEAST_SHARED <= asked.num_shared <= MOST_SHARED:
                self._places[number] = place = self._free.pop()
                for frame in map(wire.frame_of, asked.frames):
                    self._segment.part(place, len(frame))[:] = frame
            self._send(number, asked)

    def _send(self, number: int, asked: Asked) -> None:
        call = Call(self._worker, self._channel, number, asked.body)
        frames = [*map(wire.frame_of, asked.frames)]
        if number in self._places:
            length = sum(map(len, frames))
            place = self._places[number]
            call = msgspec.structs.replace(call, place=place, length=length, room=asked.room)
            frames.clear()
        # Copied: pyzmq frees what is not by a thread of its own, which nobody can end.
        self._socket.send_multipart([wire.encode(call), *frames])

    def _share(self) -> None:
        """Make memory that the server shares, where the system has some."""
        self._shares = False
        try:
            segment = Segment.make(WINDOW * MOST_SHARED)
        except OSError as error:
            _log.info("tensors go through sockets, since memory cannot be shared: %s", error)
            return
        try:
            is_shared = self.ask(wire.Share(segment.name, host_identity())).answer.is_shared
        finally:
            segment.forget_name()
        if not is_shared:
            _log.info("tensors go through sockets, since %s is on another host", self.address)
            return
        self._segment = segment
        self._free = [MOST_SHARED * place for place in range(WINDOW)]

    def _tell_of_outage(self, silent_s: float) -> None:
        if silent_s > OUTAGE_S:
            _log.warning(
                "the server at %s was not heard of for %.1f s and is again; worker %d waited with %d calls",
                self.address,
                silent_s,
                self._worker,
                len(self._under_way),
            )

    def _receive(self) -> None:
        frames = self._socket.recv_multipart(copy=False)
        answer = wire.decode_answer(frames[0].buffer)
        if not answer.number:
            raise KVStoreError(f"the server at {self.address} refused a message: {answer.error}")
        if answer.number not in self._under_way or answer.is_parked:
            return
        asked = self._under_way[answer.number]
        tensor = self._tensor(answer, [frame.buffer for frame in frames[1:]])
        if asked.take is not None and tensor is not None:
            asked.take(tensor)
            tensor = None
        elif answer.is_shared and tensor is not None:
            tensor = tensor.clone()
        self._found[answer.number] = Answered(answer, tensor)
        del self._under_way[answer.number]
        if answer.number in self._places:
            self._free.append(self._places.pop(answer.number))

    def _tensor(self, answer: Answer, frames: Sequence[memoryview]) -> Tensor | None:
        if answer.shape is None:
            return None
        if answer.is_shared:
            assert self._segment is not None, "no server knows a place otherwise"
            num_bytes = answer.shape.num_bytes()
            frames = [self._segment.part(self._places[answer.number], num_bytes)]
        (tensor,) = wire.tensors_of(frames, [answer.shape])
        return tensor
