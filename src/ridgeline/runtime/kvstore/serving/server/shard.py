"""What a server does with calls: each once, in the order of its connection, with the answers that follow.

Nothing here knows of sockets or clocks, so that a test can lose, repeat and delay what it likes. A connection
numbers its calls. One that comes again is answered again and not done again; one that comes too early is
dropped, for those before it come again as well.

A shard that takes the place of another one begins with what that had written down, and `awaits` the workers
who were there: until each of them has sent again what was taken since, or is gone, no value is sent to any of
them, and no other optimizer is set.
"""

from typing import NamedTuple

from torch import Tensor

from ridgeline.errors import KVStoreError, first_line
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.actions import Actions, Frames
from ridgeline.runtime.kvstore.serving.server.slots import Slots
from ridgeline.runtime.kvstore.serving.wire import Answer, Call, ValueSlot
from ridgeline.runtime.kvstore.updaters import SetOptimizer

FIRST = 0
"""The worker whose first values are taken."""
MOST_PARKED = 64
"""Calls of a connection that may wait for other workers: four times its window."""
_AWAITING = wire.Pull | wire.States | wire.Barrier | wire.Join | wire.Enter
"""Calls that another shard's place is taken for first."""
_REPEATED = _AWAITING | wire.Know | wire.Share | wire.Beat
"""Calls that change nothing when they are done again."""


class Sender(NamedTuple):
    """A connection of a worker."""

    worker: int
    channel: int


class Reply(NamedTuple):
    """An answer and its frame, for a connection.

    Attributes:
        call: For whose first time it is; None for a call that comes again, whose place in shared memory may
            be another call's by now.
    """

    to: Sender
    answer: Answer
    tensor: Tensor | None = None
    call: Call | None = None


class Parked(NamedTuple):
    """A call that waits for other workers."""

    call: Call
    frames: Frames


class Shard:
    """The calls of all workers, and the slices that they are about.

    Args:
        num_workers: Who are there from the beginning, from worker 0 on.
        staleness: See `Slots`.

    Attributes:
        slots: The slices.
        actions: What is done to them.
        awaits: Workers who have not yet sent what another shard had taken.
    """

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self.slots = Slots(range(num_workers), staleness)
        self.actions = Actions(self.slots)
        self.awaits: set[int] = set()
        self._num_beginners = num_workers
        self._done: dict[Sender, int] = {}
        self._failed: dict[tuple[Sender, int], str] = {}
        self._parked: dict[Sender, dict[int, Parked]] = {}
        self._barriers: dict[int, int] = {}
        self._at_barrier: dict[Sender, dict[int, int]] = {}

    def handle(self, call: Call, frames: Frames) -> list[Reply]:
        """The answers that follow from a call, also those to calls that waited for it."""
        sender = Sender(call.worker, call.channel)
        done = self._done.get(sender, 0)
        # No answer: the worker sends all again from the first that is missing.
        if call.number > done + 1:
            return []
        # A call shows that the worker is there, also one whose lease had run out.
        self.slots.join(call.worker)
        if call.number <= done:
            return self._again(sender, call, frames)
        # Before it is done: one that fails has come, too, and its failure is kept.
        self._done[sender] = call.number
        replies = self._first(sender, call, frames)
        return replies + self.released()

    def leave(self, worker: int) -> list[Reply]:
        """A worker is gone: the answers to those who waited for it."""
        self.slots.leave(worker)
        self.awaits.discard(worker)
        for sender in [one for one in self._parked if one.worker == worker]:
            del self._parked[sender]
        return self.released()

    def released(self) -> list[Reply]:
        """The answers to parked calls that need to wait no longer."""
        replies = []
        for sender, calls in self._parked.items():
            for number, (call, frames) in [*calls.items()]:
                if (reply := self._reply(sender, call, frames)) is not None:
                    del calls[number]
                    replies.append(reply)
        # A push that is done now may be what a pull before it in this list waits for.
        pushed = any(r.call and isinstance(r.call.body, wire.Push | wire.PushRows) for r in replies)
        return replies + self.released() if pushed else replies

    def _come(self, worker: int) -> None:
        """A worker that joins has come to as many barriers as the slowest of the others."""
        self.slots.join(worker)
        # With fewer, all others would wait at the next barrier for one that it never reaches.
        others = [self._barriers.get(other, 0) for other in self.slots.present - {worker}]
        passed = max(self._barriers.get(worker, 0), min(others, default=0))
        self._barriers[worker] = passed

    def _first(self, sender: Sender, call: Call, frames: Frames) -> list[Reply]:
        if isinstance(call.body, wire.Leave):
            return [Reply(sender, Answer(call.number)), *self.leave(call.worker)]
        if isinstance(call.body, wire.Barrier):
            self._barriers[call.worker] = self._barriers.get(call.worker, 0) + 1
            self._at_barrier.setdefault(sender, {})[call.number] = self._barriers[call.worker]
        if isinstance(call.body, wire.Again):
            passed = max(call.body.barriers, self._barriers.get(call.worker, 0))
            self._barriers[call.worker] = passed
        if isinstance(call.body, wire.Whole):
            self.awaits.discard(call.worker)
        return [self._done_or_parked(sender, call, frames)]

    def _again(self, sender: Sender, call: Call, frames: Frames) -> list[Reply]:
        """A call that came before: its answer, which what only reads finds again."""
        failed = self._failed.get((sender, call.number))
        if failed is not None:
            return [Reply(sender, Answer(call.number, failed))]
        # The first answer may be lost: those that only read are answered with what is there now.
        if isinstance(call.body, _REPEATED):
            return [self._done_or_parked(sender, call, frames)._replace(call=None)]
        if call.number in self._parked.get(sender, {}):
            return [self._waiting(sender, call)]
        return [Reply(sender, Answer(call.number))]

    def _done_or_parked(self, sender: Sender, call: Call, frames: Frames) -> Reply:
        if (reply := self._reply(sender, call, frames)) is not None:
            return reply
        parked = self._parked.setdefault(sender, {})
        if call.number not in parked and len(parked) >= MOST_PARKED:
            return self._refused(
                sender,
                call,
                KVStoreError(
                    f"wanted at most {MOST_PARKED} calls of a connection that wait for other workers, got "
                    "another one"
                ),
            )
        # With its frames, which hold the memory of the message.
        parked.setdefault(call.number, Parked(call, frames))
        return self._waiting(sender, call)

    def _waiting(self, sender: Sender, call: Call) -> Reply:
        """The word that a call waits, and for whom: its worker names them if they never come."""
        awaits = {*self.awaits}
        if isinstance(call.body, wire.Pull) and not awaits:
            awaits = self.slots.awaited(call.worker, call.body.slot)
        elif isinstance(call.body, wire.Barrier) and not awaits:
            mine = self._at_barrier[sender][call.number]
            awaits = {w for w in self.slots.present if self._barriers.get(w, 0) < mine}
        elif isinstance(call.body, wire.Know):
            awaits = {FIRST}
        answer = Answer(call.number, is_parked=True, awaits=tuple(sorted(awaits)))
        return Reply(sender, answer)

    def _reply(self, sender: Sender, call: Call, frames: Frames) -> Reply | None:
        """The answer or refusal; None where the call waits for other workers."""
        try:
            return self._answered(sender, call, frames) if self._may_answer(sender, call) else None
        except KVStoreError as error:
            return self._refused(sender, call, error)

    def _may_answer(self, sender: Sender, call: Call) -> bool:
        body = call.body
        if isinstance(body, wire.Know):
            return self._is_known(body.slot)
        if isinstance(body, wire.Push | wire.PushRows):
            return not self.awaits or self._is_known(body.slot)
        # A push that was taken before is worked in with what was set then, not with what is set next.
        if isinstance(body, SetOptimizer | wire.SetUpdater | wire.LoadStates):
            return not self.awaits or self.actions.updates_by is None
        if self.awaits and isinstance(body, _AWAITING):
            return False
        if isinstance(body, wire.Pull):
            return self.slots.may_pull(call.worker, body.slot)
        if isinstance(body, wire.Barrier):
            mine = self._at_barrier.get(sender, {}).get(call.number)
            if mine is None:
                raise KVStoreError(
                    f"wanted the call again that was call {call.number} of this connection, got a barrier"
                )
            if any(self._barriers.get(other, 0) < mine for other in self.slots.present):
                return False
            # Who pushed before others was told only that its sum had come.
            self.slots.check_rounds(call.worker)
        return True

    def _is_known(self, slot: ValueSlot) -> bool:
        """Whether a slice has its first value."""
        if slot not in self.slots.slices and FIRST not in self.slots.present:
            raise KVStoreError(
                f"wanted a first value of key {slot.key!r} from worker {FIRST}, got none, and that worker is "
                "gone; restart with all workers"
            )
        return slot in self.slots.slices

    def _answered(self, sender: Sender, call: Call, frames: Frames) -> Reply:
        try:
            done = self.actions.do(call.worker, call.body, frames)
        # What a worker sends must not end the server that others use.
        except (TypeError, ValueError, RuntimeError, IndexError) as error:  # of an updater
            return self._refused(sender, call, error)
        if isinstance(call.body, wire.Join) and call.worker >= self._num_beginners:
            self._come(call.worker)  # only now all have said to how many barriers they had come
        versions = done.versions
        if isinstance(call.body, wire.Beat | wire.Join | wire.Barrier):
            versions = {one: self._barriers.get(one, 0) for one in self.slots.present}
        shape = wire.shape_of(done.tensor) if done.tensor is not None else None
        answer = Answer(call.number, shape=shape, is_shared=done.is_shared, versions=versions)
        return Reply(sender, answer, done.tensor, call)

    def _refused(self, sender: Sender, call: Call, error: Exception) -> Reply:
        text = str(error)
        if not isinstance(error, KVStoreError):
            text = f"wanted an update that works, got {type(error).__name__}: {first_line(error)}"
        self._failed[sender, call.number] = text
        # As many as a connection's window: no call before these may come again.
        for other in [key for key in self._failed if key[0] == sender][:-16]:
            del self._failed[other]
        return Reply(sender, Answer(call.number, text))
