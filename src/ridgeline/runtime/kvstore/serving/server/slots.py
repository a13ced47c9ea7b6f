"""The slices of one server: values, what each worker has pushed to them, and when a pull may be answered.

Nothing here knows of sockets or time. With `staleness=None` a push is worked in at once. With s > 0 a pull
waits until no present worker is more than s pushes of that key behind the one that asks. With s = 0 the
pushes of a round are added up in the order of workers and worked in together, which is what synchronous
workers see.

How far a worker is with a slice, its clock, is how many of its pushes that holds, and where it began. Who
comes later begins where the slowest of the others is: no worker waits for pushes that it never owed. Who is
back after its lease continues where it was, since it has all its steps to do still: were it as far as the
others, it would wait for them in the end, and they for it.

Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS
2013 (staleness); MXNet, dist_sync (rounds).
"""

import contextlib
from collections import deque
from collections.abc import Callable

from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Held
from ridgeline.runtime.kvstore.serving.wire import ValueSlot
from ridgeline.runtime.kvstore.updaters import Updater
from ridgeline.runtime.kvstore.values.held_values import apply
from ridgeline.runtime.kvstore.values.merging import merged

MOST_SLICES = 1 << 20
"""Of one server: a tebibyte in slices of a mebibyte."""


class Slice:
    """A value, and who has pushed to it.

    Attributes:
        value: As the pushes so far left it.
        rounds: Pushes of each worker that it holds.
        taken: Pushes of each worker that have come, whatever became of them.
        waiting: With s = 0, pushes of rounds that are not complete, by worker.
        since: Where workers began who came later, less the pushes that the value held of them then.
        updater: Works sums in.
        failure: Why it could not work in a round, which is lost; nothing is read or pushed from then on.
    """

    def __init__(self, value: Tensor, updater: Updater | None) -> None:
        self.value = value
        self.updater = updater
        self.rounds: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self.waiting: dict[int, deque[Tensor]] = {}
        self.since: dict[int, int] = {}
        self.failure = ""

    def clock(self, worker: int) -> int:
        """How far a worker is."""
        return self.since.get(worker, 0) + self.rounds.get(worker, 0)

    @property
    def rounds_done(self) -> int:
        """With s = 0, the rounds that are complete."""
        return max((self.clock(worker) for worker, n in self.rounds.items() if n), default=0)

    @property
    def held(self) -> Held:
        """Shape and type."""
        return Held(self.value.shape, self.value.dtype)


class Slots:
    """All slices of one server.

    Args:
        workers: Who is there from the beginning. Others count for a slice once they `enter` it.
        staleness: How many pushes of a key a worker may be ahead of another; None: any number.

    Attributes:
        present: Workers who are there.
        slices: Those that have a value.
    """

    def __init__(self, workers: range, staleness: int | None) -> None:
        self.staleness = staleness
        self.present = set(workers)
        self._beginners = workers
        self.slices: dict[ValueSlot, Slice] = {}
        self._make_updater: Callable[[], Updater] | None = None

    def init(self, slot: ValueSlot, value: Tensor) -> None:
        """Take a first value; a slice has one already where another worker came first.

        Raises:
            KVStoreError: it has one of another shape or type, or there are as many slices as may be.
        """
        if slot in self.slices:
            self.check(slot, Held(value.shape, value.dtype))
            return
        if len(self.slices) >= MOST_SLICES:
            raise KVStoreError(
                f"wanted at most {MOST_SLICES} slices of values on a server, got another one, of key "
                f"{slot.key!r}; have more servers, or fewer keys"
            )
        updater = None if self._make_updater is None else self._make_updater()
        # A copy, as the value lies in the memory of the message, which is read-only or shared.
        self.slices[slot] = Slice(value.clone(), updater)

    def check(self, slot: ValueSlot, held: Held) -> None:
        """Refuse what is of another shape or type.

        Raises:
            KVStoreError: names both; or the slice has no value.
        """
        if slot not in self.slices:
            raise KVStoreError(f"wanted a key with a value, got {slot.key!r}; call init first")
        if self.slices[slot].held != held:
            raise KVStoreError(
                f"wanted {self.slices[slot].held} for key {slot.key!r} from row {slot.start} on, as it was "
                f"initialised, got {held}"
            )

    def set_updater(self, make: Callable[[], Updater]) -> None:
        """Have updaters of this kind from now on, one for each slice."""
        self.set_later_updater(make)
        for one in self.slices.values():
            one.updater = make()

    def set_later_updater(self, make: Callable[[], Updater]) -> None:
        """Have updaters of this kind for slices that are still to come."""
        self._make_updater = make

    def updaters(self) -> dict[ValueSlot, Updater]:
        """Of the slices that have one."""
        return {slot: one.updater for slot, one in self.slices.items() if one.updater is not None}

    def num_taken(self, worker: int, slot: ValueSlot) -> int:
        """How many pushes of a worker have come.

        Raises:
            KVStoreError: the slice has no value.
        """
        return self._of(slot).taken.get(worker, 0)

    def take(self, worker: int, slot: ValueSlot, number: int) -> bool:
        """Count a push; False: it was counted before.

        Args:
            worker: Who pushes.
            slot: To what.
            number: Of the push, from 1 on; 0: of the next one.

        Raises:
            KVStoreError: the slice has no value, or pushes before this one are missing.
        """
        one = self._of(slot)
        taken = one.taken.get(worker, 0)
        if 0 < number <= taken:
            return False
        if number > taken + 1:
            raise KVStoreError(
                f"wanted push {taken + 1} of worker {worker} to key {slot.key!r}, got push {number}: this "
                "server does not have what was pushed before; restart from a checkpoint"
            )
        one.taken[worker] = taken + 1
        return True

    def push(self, worker: int, slot: ValueSlot, total: Tensor) -> None:
        """Take a worker's sum; rows may be sparse. Its memory is free again when this returns.

        Raises:
            KVStoreError: the slice has no value, no updater was set, or it fails.
        """
        one = self._of(slot)
        if one.updater is None and self.staleness != 0:
            raise KVStoreError(
                f"wanted an optimizer or updater before the first push to key {slot.key!r}, since nothing "
                "says what an asynchronous push does to a value, got none; call set_optimizer"
            )
        if self.staleness == 0:
            # The memory in which it came is used again before the round is complete.
            one.waiting.setdefault(worker, deque()).append(total.clone())
            self._complete(slot, one)
            return
        apply(one.updater, slot.key, total, one.value)
        one.rounds[worker] = one.rounds.get(worker, 0) + 1

    def may_pull(self, worker: int, slot: ValueSlot) -> bool:
        """Whether no worker is too far behind for a worker to read a slice.

        Raises:
            KVStoreError: the slice has no value.
        """
        one = self._of(slot)
        # Who has not pushed yet reads what there is, and waits for nobody.
        if self.staleness is None or not one.taken.get(worker):
            return True
        if self.staleness == 0:
            return not one.waiting.get(worker)
        behind = min(one.clock(other) for other in {*self._counted(one), worker})
        return one.clock(worker) - behind <= self.staleness

    def awaited(self, worker: int, slot: ValueSlot) -> set[int]:
        """Those whose pushes are missing where a worker may not read a slice yet.

        Raises:
            KVStoreError: the slice has no value.
        """
        one = self._of(slot)
        behind = one.clock(worker) - (self.staleness or 0)
        if self.staleness == 0:
            here = [other for other in self._counted(one) if not one.waiting.get(other)]
            return {other for other in here if one.clock(other) <= behind}
        return {other for other in self._counted(one) if one.clock(other) < behind}

    def pull(self, slot: ValueSlot, rows: Tensor | None) -> tuple[Tensor, dict[int, int]]:
        """The value itself, or a copy of some rows, and how many pushes of each worker it holds.

        Raises:
            KVStoreError: the slice has no value, or no such row.
        """
        one = self._of(slot)
        if rows is None:
            return one.value, dict(one.rounds)
        check_numbers(slot, rows, one.held)
        return one.value[rows], dict(one.rounds)

    def check_rounds(self, worker: int) -> None:
        """Refuse where a round has failed to which a worker has pushed.

        Raises:
            KVStoreError: names the first such slice, and why.
        """
        for slot, one in self.slices.items():
            if one.failure and one.taken.get(worker):
                self._of(slot)

    def join(self, worker: int) -> None:
        """A worker is there; one that is back continues where it was, and others wait for it again."""
        self.present.add(worker)

    def enter(self, worker: int, slot: ValueSlot, clock: int) -> int:
        """A worker pushes to a slice from now on; how far it is.

        Raises:
            KVStoreError: the slice has no value.
        """
        one = self._of(slot)
        self._enter(worker, one)
        # Less what the value holds of it already, so that the clock, the sum of both, is what was said.
        one.since[worker] = max(one.since[worker], clock - one.rounds.get(worker, 0))
        self._complete(slot, one)
        return one.clock(worker)

    def leave(self, worker: int) -> None:
        """A worker is gone: none waits for it. What it has pushed to rounds that others complete counts."""
        self.present.discard(worker)
        for slot, one in self.slices.items():
            with contextlib.suppress(KVStoreError):  # the next read or push raises it
                self._complete(slot, one)

    def _of(self, slot: ValueSlot) -> Slice:
        if slot not in self.slices:
            raise KVStoreError(f"wanted a key with a value, got {slot.key!r}; call init first")
        one = self.slices[slot]
        if one.failure:
            raise KVStoreError(
                f"wanted a value of key {slot.key!r} with all rounds worked in, got one that failed: "
                f"{one.failure}; restart from a checkpoint, with an optimizer that takes what is pushed"
            )
        return one

    def _counted(self, one: Slice) -> list[int]:
        """Who is there and pushes to a slice."""
        return [w for w in self.present if w in self._beginners or w in one.since]

    def _enter(self, worker: int, one: Slice) -> None:
        others = [one.clock(other) for other in self._counted(one) if other != worker]
        slowest = one.rounds_done if self.staleness == 0 else min(others, default=0)
        held = one.rounds.get(worker, 0)
        one.since[worker] = max(one.since.get(worker, 0), slowest - held)

    def _complete(self, slot: ValueSlot, one: Slice) -> None:
        """Work in all rounds to which everybody has pushed who is there and as far as that."""
        while not one.failure and any(one.waiting.values()):
            here = self._counted(one)
            # Where all who are there begin later, so does the next round.
            done = max(one.rounds_done, min(map(one.clock, here), default=0))
            who = sorted(w for w, queue in one.waiting.items() if queue and one.clock(w) <= done)
            # Those ahead belong to later rounds, and are not waited for in this one.
            if not who or not all(one.waiting.get(w) for w in here if one.clock(w) <= done):
                return
            totals = [one.waiting[worker].popleft() for worker in who]
            # In the order of the workers, so that a sum has the same bits in every run.
            total = merged(totals, one.value.device, borrows=True)
            try:
                apply(one.updater, slot.key, total, one.value)
            except KVStoreError as error:
                # Kept: the sums of this round are taken out of the queues and cannot be worked in again.
                one.failure = str(error)
                raise
            for worker in who:
                one.rounds[worker] = one.rounds.get(worker, 0) + 1


def check_numbers(slot: ValueSlot, rows: Tensor, held: Held) -> None:
    """Refuse numbers of rows that a slice does not have.

    Raises:
        KVStoreError: names the slice and its rows.
    """
    num_rows = held.shape[0] if held.shape else 0
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise KVStoreError(
            f"wanted rows of key {slot.key!r} from {slot.start} to {slot.start + num_rows - 1}, got "
            f"{slot.start + int(rows.min())} to {slot.start + int(rows.max())}"
        )
