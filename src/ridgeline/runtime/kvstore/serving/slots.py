"""The slices of one server: values, what each worker has pushed to them, and when a pull may be answered.

Nothing here knows of sockets or time. With `staleness=None` a push is worked in at once. With s > 0 a pull
waits until nobody who is there is more than s pushes of that key behind the one that asks. With s = 0 the
pushes of a round are added up in the order of workers and worked in together, which is what synchronous
workers see.

Source: Ho et al., "More effective distributed ML via a stale synchronous parallel parameter server", NeurIPS
2013 (staleness); MXNet, dist_sync (rounds).
"""

from collections import deque
from collections.abc import Callable

from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Held
from ridgeline.runtime.kvstore.held_values import apply
from ridgeline.runtime.kvstore.merging import merged
from ridgeline.runtime.kvstore.serving.wire import Slot
from ridgeline.runtime.kvstore.updaters import Updater

MOST_SLICES = 1 << 20
"""Of one server: a tebibyte in slices of a mebibyte."""


class Slice:
    """A value, and who has pushed to it.

    Attributes:
        value: As the pushes so far left it.
        rounds: Pushes of each worker that it holds.
        taken: Pushes of each worker that have come, whatever became of them.
        waiting: With s = 0, pushes of rounds that are not complete, by worker.
        updater: Works sums in.
    """

    def __init__(self, value: Tensor, updater: Updater | None) -> None:
        self.value = value
        self.updater = updater
        self.rounds: dict[int, int] = {}
        self.taken: dict[int, int] = {}
        self.waiting: dict[int, deque[Tensor]] = {}

    @property
    def held(self) -> Held:
        """Shape and type."""
        return Held(self.value.shape, self.value.dtype)


class Slots:
    """All slices of one server.

    Args:
        workers: Who is there from the beginning.
        staleness: How many pushes of a key a worker may be ahead of another; None: any number.
    """

    def __init__(self, workers: range, staleness: int | None) -> None:
        self.staleness = staleness
        self.present = set(workers)
        self._slices: dict[Slot, Slice] = {}
        self._make_updater: Callable[[], Updater] | None = None

    def init(self, slot: Slot, value: Tensor) -> None:
        """Take a first value; a slice has one already where another worker came first.

        Raises:
            KVStoreError: it has one of another shape or type, or there are as many slices as may be.
        """
        if slot in self._slices:
            self.check(slot, Held(value.shape, value.dtype))
            return
        if len(self._slices) >= MOST_SLICES:
            raise KVStoreError(
                f"wanted at most {MOST_SLICES} slices of values on a server, got another one, of key "
                f"{slot.key!r}; have more servers, or fewer keys"
            )
        updater = None if self._make_updater is None else self._make_updater()
        self._slices[slot] = Slice(value.clone(), updater)

    def all(self) -> dict[Slot, Slice]:
        """The slices themselves."""
        return self._slices

    def knows(self, slot: Slot) -> bool:
        """Whether a slice has a value."""
        return slot in self._slices

    def check(self, slot: Slot, held: Held) -> None:
        """Refuse what is of another shape or type.

        Raises:
            KVStoreError: names both; or the slice has no value.
        """
        if slot not in self._slices:
            raise KVStoreError(f"wanted a key with a value, got {slot.key!r}; call init first")
        if self._slices[slot].held != held:
            raise KVStoreError(
                f"wanted {self._slices[slot].held} for key {slot.key!r} from row {slot.start} on, as it was "
                f"initialised, got {held}"
            )

    def set_updater(self, make: Callable[[], Updater]) -> None:
        """Have updaters of this kind from now on, one for each slice."""
        self.set_later_updater(make)
        for one in self._slices.values():
            one.updater = make()

    def set_later_updater(self, make: Callable[[], Updater]) -> None:
        """Have updaters of this kind for slices that are still to come."""
        self._make_updater = make

    def updaters(self) -> dict[Slot, Updater]:
        """Of the slices that have one."""
        return {slot: one.updater for slot, one in self._slices.items() if one.updater is not None}

    def num_taken(self, worker: int, slot: Slot) -> int:
        """How many pushes of a worker have come.

        Raises:
            KVStoreError: the slice has no value.
        """
        return self._of(slot).taken.get(worker, 0)

    def take(self, worker: int, slot: Slot, number: int) -> bool:
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
                "server does not have what was pushed before; begin again from a checkpoint"
            )
        one.taken[worker] = taken + 1
        return True

    def push(self, worker: int, slot: Slot, total: Tensor) -> None:
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

    def may_pull(self, worker: int, slot: Slot) -> bool:
        """Whether nobody is too far behind for a worker to read a slice.

        Raises:
            KVStoreError: the slice has no value.
        """
        one = self._of(slot)
        if self.staleness is None or not one.taken.get(worker):
            return True
        if self.staleness == 0:
            return not one.waiting.get(worker)
        behind = min(one.rounds.get(other, 0) for other in {*self.present, worker})
        return one.rounds.get(worker, 0) - behind <= self.staleness

    def pull(self, slot: Slot, rows: Tensor | None) -> tuple[Tensor, dict[int, int]]:
        """The value itself, or a copy of some rows, and how many pushes of each worker it holds.

        Raises:
            KVStoreError: the slice has no value, or no such row.
        """
        one = self._of(slot)
        if rows is None:
            return one.value, dict(one.rounds)
        check_numbers(slot, rows, one.held)
        return one.value[rows], dict(one.rounds)

    def join(self, worker: int) -> None:
        """A worker is there."""
        self.present.add(worker)

    def leave(self, worker: int) -> None:
        """A worker is gone: nobody waits for it. What it has pushed to rounds that others complete counts."""
        self.present.discard(worker)
        for slot, one in self._slices.items():
            self._complete(slot, one)

    def _of(self, slot: Slot) -> Slice:
        if slot not in self._slices:
            raise KVStoreError(f"wanted a key with a value, got {slot.key!r}; call init first")
        return self._slices[slot]

    def _complete(self, slot: Slot, one: Slice) -> None:
        """Work in all rounds to which everybody who is there has pushed."""
        while any(one.waiting.values()) and all(one.waiting.get(w) for w in self.present):
            who = sorted(worker for worker, queue in one.waiting.items() if queue)
            totals = [one.waiting[worker].popleft() for worker in who]
            apply(one.updater, slot.key, merged(totals, one.value.device, borrows=True), one.value)
            for worker in who:
                one.rounds[worker] = one.rounds.get(worker, 0) + 1


def check_numbers(slot: Slot, rows: Tensor, held: Held) -> None:
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
