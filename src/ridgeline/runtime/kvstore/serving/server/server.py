"""A server process: one socket, the calls that come in by it, and the leases of the workers.

A worker that is not heard of for a lease is taken for gone: what waits for it continues.
"""

import logging
import math
import os
import sys
import time
from collections.abc import Callable

import msgspec
import torch
import zmq

from ridgeline.errors import KVStoreError
from ridgeline.host.memory import keep_freed_memory
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.addresses import check_listening, host_identity
from ridgeline.runtime.kvstore.serving.addressing.entry import Door
from ridgeline.runtime.kvstore.serving.addressing.keys import Keys
from ridgeline.runtime.kvstore.serving.segment import Segment
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Sender, Shard
from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots
from ridgeline.runtime.kvstore.serving.wire import Answer
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, SetOptimizer
from ridgeline.workers.host_threads import set_threads

LEASE_S = 10.0
"""How long a worker may be silent. Workers say that they are there five times as often."""
KEPT_S = 1800.0
"""How long memory that a worker shares is kept after its lease has ended: it may come back and use it."""
LEFT = "all workers have left"
_POLL_MS = 200
_WRITING_POLL_MS = 5
"""While a snapshot is written that may be waited for."""
_LINGER_MS = 1000
"""How long the last answers may take to leave."""
_QUEUED = 64
"""Messages that may wait from or for one connection, four times its window. Further ones from it stay where
they are; further ones for it are dropped, and it asks again."""
MOST_CONNECTIONS = 1 << 16
"""Of workers, over the life of a server; it remembers a little of each."""
_LASTING = (
    SetOptimizer
    | wire.SetUpdater
    | wire.LoadStates
    | wire.Join
    | wire.Enter
    | wire.Leave
    | wire.Cover
)
"""Calls that workers do not keep: they are answered once a snapshot holds what they did."""
_DROPPED = "a malformed message was dropped"

_log = logging.getLogger(__name__)


class Server:
    """Answers calls until it is stopped.

    Args:
        shard: What it holds.
        address: To bind: `tcp://127.0.0.1:*` takes a free port of the loopback.
        lease_s: How long a worker may be silent.
        keys: Who is let in; None for everybody, on the loopback alone.
        snapshots: Of the shard, where there are to be some.

    Attributes:
        address: Where it is found.
        epoch: Of those that have served these slices, by their snapshots; 0: it writes none.

    Raises:
        KVStoreError: the address is none, is taken, or is one that other hosts reach and there are no keys.
    """

    def __init__(
        self,
        shard: Shard,
        address: str,
        lease_s: float = LEASE_S,
        keys: Keys | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        check_listening(address, has_keys=keys is not None)
        self._shard = shard
        self._snapshots = snapshots
        self.epoch = 0 if snapshots is None else snapshots.epoch
        self._is_superseded = False
        self._until_written: dict[tuple[Sender, int], tuple[int, Reply]] = {}
        self._lease_s = lease_s
        self._identities: dict[Sender, bytes] = {}
        # Those who were there before this server have a lease of it, too.
        self._heard_s = dict.fromkeys(shard.awaits, time.monotonic())
        self._looked_s = self._asked_s = time.monotonic()
        self._lost_s: dict[int, float] = {}
        self._segments: dict[Sender, Segment] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # A peer that is gone must not keep this process at its end; `close` gives answers a second.
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUED)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MOST_BYTES)
        self._door = Door(self._context, self._socket, address, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            self.close()
            raise KVStoreError(
                f"wanted a free address to serve a store at, got {address!r}: {error}; for example "
                "'tcp://127.0.0.1:*'"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def serve(self, stops: Callable[[], bool]) -> None:
        """Answer until `stops` says so, which is asked a few times a second, or another server is there."""
        while not stops() and not self._is_superseded:
            is_writing = self._snapshots is not None and self._snapshots.is_busy
            # One call a turn, so that leases and snapshots are looked at however many come.
            if self._socket.poll(_WRITING_POLL_MS if is_writing else _POLL_MS):
                self._answer()
            self._door.look()
            self._end_leases()
            if self._snapshots is not None:
                self._write_down(self._snapshots)

    @property
    def is_used(self) -> bool:
        """Whether a worker that was heard of has not left."""
        is_there = any(worker in self._shard.slots.present for worker in self._heard_s)
        return is_there or bool(self._until_written)

    def idle_workers(self, after_s: float) -> list[int]:
        """Those who have not left, where none of them has asked for anything for so long."""
        if time.monotonic() - self._asked_s <= after_s:
            return []
        return sorted(worker for worker in self._heard_s if worker in self._shard.slots.present)

    def close(self) -> None:
        """Write what is not written yet, and release the address."""
        if self._snapshots is not None:
            self._snapshots.close(writes=not self._is_superseded)
        self._door.close()
        self._context.destroy(linger=_LINGER_MS)

    def _answer(self) -> None:
        # Not copied: tensors are read in the message's own memory.
        identity, *frames = self._socket.recv_multipart(copy=False)
        try:
            call = wire.decode_call(frames[0].buffer if frames else b"")
            sender = Sender(call.worker, call.channel)
            if call.epoch != self.epoch:
                self._refuse_epoch(identity.bytes, call)
                return
            self._check_room(sender)
            payload = self._shared(sender, call) or [frame.buffer for frame in frames[1:]]
        except KVStoreError as error:
            self._door.refusals.tell(_DROPPED, f"{error}; it came from {_peer(identity)}")
            refused = wire.encode(Answer(0, str(error)))
            self._socket.send_multipart([identity.bytes, refused])
            return
        # The last one counts: a worker that connects again has another identity of ZeroMQ's.
        self._identities[sender] = identity.bytes
        self._hear(call.worker)
        if not isinstance(call.body, wire.Beat):
            self._asked_s = time.monotonic()
        replies = self._shard.handle(call, payload)
        if self._snapshots is not None:
            self._snapshots.count(call.body, sum(map(len, payload)))
        self._send(self._held_back(replies, call))

    def _refuse_epoch(self, identity: bytes, call: wire.Call) -> None:
        """Say which server this is; one that hears of a later one ends, if there is one."""
        # A word of a worker alone is not believed: the file of epochs tells.
        if call.epoch > self.epoch and self._snapshots is not None:
            self._is_superseded = self._snapshots.is_superseded
        self._hear(call.worker)
        header = wire.encode(Answer(call.number, epoch=self.epoch))
        self._socket.send_multipart([identity, header])

    def _held_back(self, replies: list[Reply], call: wire.Call | None = None) -> list[Reply]:
        """The replies, less those to calls that are answered only once they are written down.

        Args:
            replies: To send.
            call: What they follow from; None: from a worker that is gone.
        """
        if self._snapshots is None:
            return replies
        kept = list[Reply]()
        for reply in replies:
            name = reply.to, reply.answer.number
            is_own = call is not None and name == (Sender(call.worker, call.channel), call.number)
            asked = call if is_own else reply.call
            lasts = asked is not None and isinstance(asked.body, _LASTING)
            if not lasts or reply.answer.error or reply.answer.is_parked:
                kept.append(reply)
                continue
            if name not in self._until_written:
                self._until_written[name] = self._snapshots.want(), reply
            # Said at once, since a worker that hears nothing asks again, and then gives the server up.
            kept.append(Reply(reply.to, Answer(reply.answer.number, is_parked=True)))
        return kept

    def _write_down(self, snapshots: Snapshots) -> None:
        """Begin snapshots that are due, and answer those who waited for one."""
        snapshots.turn()
        for name, (wanted, reply) in [*self._until_written.items()]:
            if wanted <= snapshots.durable:
                self._send([reply])
                del self._until_written[name]
            elif wanted <= snapshots.begun and not snapshots.is_busy:
                self._is_superseded |= snapshots.is_superseded
                answer = Answer(reply.answer.number, snapshots.failed)
                self._send([reply._replace(answer=answer)])
                del self._until_written[name]

    def _check_room(self, sender: Sender) -> None:
        """Refuse connections without end."""
        if sender not in self._identities and len(self._identities) >= MOST_CONNECTIONS:
            raise KVStoreError(
                f"wanted at most {MOST_CONNECTIONS} connections over the life of a server, got another one, "
                f"of worker {sender.worker}"
            )

    def _hear(self, worker: int) -> None:
        self._heard_s[worker] = now = time.monotonic()
        if worker in self._lost_s:
            _log.warning(
                "worker %d is back, after %.1f s without a message",
                worker,
                now - self._lost_s.pop(worker),
            )

    def _send(self, replies: list[Reply]) -> None:
        for reply in replies:
            answer = reply.answer
            frames: list[memoryview] = []
            if reply.tensor is not None:
                frame = wire.frame_of(reply.tensor)
                # Only for the first time of a call: the place of one that came again may be another's by now.
                if reply.call is not None and 0 < len(frame) <= reply.call.room:
                    self._segments[reply.to].part(reply.call.place, len(frame))[:] = frame
                    answer = msgspec.structs.replace(answer, is_shared=True)
                else:
                    frames = [frame]
            if self._snapshots is not None:
                answer = msgspec.structs.replace(
                    answer,
                    epoch=self.epoch,
                    begun=self._snapshots.begun,
                    durable=self._snapshots.durable,
                )
            header = wire.encode(answer)
            # Copied: the next push changes a value while this may still be on its way.
            self._socket.send_multipart([self._identities[reply.to], header, *frames])

    def _shared(self, sender: Sender, call: wire.Call) -> list[memoryview]:
        """The frame of a call that lies in shared memory; none where it was sent, or there is none."""
        if sender not in self._segments:
            match call.body:
                case wire.Share(name, host) if host == host_identity():
                    self._segments[sender] = Segment.open(name)
        if call.place < 0 and not call.length and not call.room:
            return []
        if sender not in self._segments:
            raise KVStoreError("wanted memory that this connection shares, got a place in none")
        segment = self._segments[sender]
        segment.part(call.place, call.room)
        return [segment.part(call.place, call.length)] if call.length else []

    def _end_leases(self) -> None:
        now = time.monotonic()
        # While this server did something else, words of workers waited for it.
        late_s, self._looked_s = now - self._looked_s, now
        # A long update or a stopped process: silence that is this server's own does not count.
        if late_s > 1.0:
            self._heard_s = {worker: heard_s + late_s for worker, heard_s in self._heard_s.items()}
        for worker, heard_s in [*self._heard_s.items()]:
            if now - heard_s > self._lease_s:
                del self._heard_s[worker]
                if worker not in self._shard.slots.present:
                    self._forget_memory(worker)
                else:
                    self._lost_s[worker] = heard_s
                    _log.warning(
                        "worker %d sent no message for %.3g s: no worker waits for it any longer",
                        worker,
                        self._lease_s,
                    )
                    self._send(self._held_back(self._shard.leave(worker)))
        for worker, heard_s in [*self._lost_s.items()]:
            if now - heard_s > KEPT_S:
                del self._lost_s[worker]
                self._forget_memory(worker)

    def _forget_memory(self, worker: int) -> None:
        for sender in [one for one in self._segments if one.worker == worker]:
            del self._segments[sender]


def _peer(frame: zmq.Frame) -> str:
    """Where a message came from."""
    try:
        return str(frame.get("Peer-Address"))
    except zmq.ZMQError:
        return "nowhere that is known"


def is_wanted() -> bool:
    """Wait for a line on standard input; False: it has ended. Meanwhile, what a server needs is imported."""
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    if not poller.poll(0):
        # What torch imports with the first step of an optimizer takes seconds.
        values = torch.zeros(2, 1, device="cpu")
        OptimizerUpdater(SetOptimizer("sgd", 1.0, {}))("", values[0], values[1])
    return bool(os.read(sys.stdin.fileno(), 1))


def serve_beside(server: Server, idle_s: float = math.inf) -> None:
    """Print the address on standard output, and serve until standard input ends and all workers have left.

    Workers who hang say that they are there, and never leave: once none of them has asked for anything for
    `idle_s` they are named in the log, and it ends.

    Behind the address stands the epoch of a server that writes snapshots. That all have left is printed, too:
    the process that started it then knows that it is to end soon.
    """
    set_threads(1)  # the workers' cores are theirs
    keep_freed_memory()  # each message would cost page faults
    sys.stdout.write(
        f"{server.address} {server.epoch}\n" if server.epoch else f"{server.address}\n"
    )
    sys.stdout.flush()
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    is_over = False

    def stops() -> bool:
        nonlocal is_over
        if not is_over and poller.poll(0):
            # An empty read is the end: the process that started this one closed it, or is gone.
            is_over = not os.read(sys.stdin.fileno(), 4096)
        if is_over and (idle := server.idle_workers(idle_s)):
            _log.error(
                "wanted calls of worker %s, or the word that it leaves, got none for %.3g s, though it says "
                "that it is there; the worker beside this server has left, so it ends: see what the other "
                "one does",
                " and ".join(map(str, idle)),
                idle_s,
            )
            return True
        return is_over and not server.is_used

    server.serve(stops)
    sys.stdout.write(f"{LEFT}\n")
    sys.stdout.flush()
