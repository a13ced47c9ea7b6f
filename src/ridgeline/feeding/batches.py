"""Feeding a step: batches are loaded, pinned and copied to the device while it computes.

A loader lane (a thread) stays up to `depth` batches ahead. For a GPU it copies every batch into a ring of
pinned memory and enqueues the transfer into a ring of device memory, on a stream of its own; the
consumer's stream waits for it on the device, and the ring waits, likewise, for the consumer's stream.
"""

import contextlib
import functools
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from ridgeline.engine import Engine, Variable
from ridgeline.feeding.channel import Channel
from ridgeline.feeding.handover import Handover
from ridgeline.feeding.meter import Totals
from ridgeline.feeding.passes import Pass, check_pass, closed, given_out, no_more
from ridgeline.feeding.report import CopyReport, bounding_stage, hidden_share
from ridgeline.feeding.slots import Carrier, Slot
from ridgeline.feeding.source import Source, end_loading, shut_down
from ridgeline.feeding.stream import Stream
from ridgeline.recording.gaps import TALLY


class FeedStream(Stream):
    """Batches on their device, in order, pass after pass; made by `rl.feed`.

    Loading begins with the first batch asked for in a pass. A loop that breaks off needs no `close()`:
    dropping the feed, or its next pass, ends the thread. `next(feed)` begins a pass where there is none yet,
    which the first `for` then continues with. Threads that are to share a pass share one `iter(feed)`.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: torch.device,
        depth: int,
        channel: Channel | None,
        *,
        fixed_addresses: bool = False,
        handover: Handover | None = None,
    ) -> None:
        super().__init__()
        # Two more than are ahead: the batch that the caller has, and the one it had before.
        num_slots = depth if fixed_addresses else depth + 2
        self._device = device
        self._depth = depth
        self._is_fixed = fixed_addresses
        self._handover = handover if depth > 0 else None
        # A loop still refers to its last batch while it asks for the next: that slot rests one round.
        self._num_resting = 0 if fixed_addresses else 1
        self._carrier = (
            None
            if channel is None
            else Carrier(channel, fixed_addresses=fixed_addresses, margin=num_slots)
        )
        self._source = Source(loader, self._carrier, depth)
        self._slots = [Slot() for _ in range(num_slots)]
        self._free: deque[Slot] = deque(self._slots)
        self._ahead: deque[Slot] = deque()
        self._lent: deque[Slot] = deque()
        self._has_begun = False
        self._engine: Engine | None = None
        self._position: Variable | None = None
        self._closing: weakref.finalize[..., Self] | None = None
        self._is_over = False
        self._is_closed = False
        # By a loop; what `next` began before is continued by the first one.
        self._is_claimed = False
        self._number = 0  # of the present pass
        self._batches = self._batches_before = 0
        self._waited_s = 0.0
        self._compute_s = 0.0
        self._handed_s: float | None = None
        self._asked_s: float | None = None

    def __iter__(self) -> Iterator[Any]:
        """A new pass, or the present one where no loop uses it yet, or the loader gives only one.

        Raises:
            PlanError: the feed is closed, its loader is over and cannot begin again, or is who asks.
        """
        self._check_asker()
        with self._turn:
            if self._is_closed:
                raise closed()
            is_under_way = self._has_begun and not self._is_over
            is_continued = is_under_way and (not self._is_claimed or self._source.is_one_shot)
            if not is_continued and (self._has_begun or self._is_claimed):
                self._begin_again()
            self._is_claimed = True
            return Pass(self.next_of, self._number)

    def __len__(self) -> int:
        """Batches of a pass as its loader counts them; a TypeError of the loader's where it does not."""
        return len(self._source.loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return True  # however many batches there are

    def next_of(self, number: int) -> Any:
        """The next batch of a pass; a PlanError where a later one has begun; else see `feed`."""
        self._check_asker()
        with self._turn:
            check_pass(number, self._number)
            return self._next()

    def _next(self) -> Any:
        """The next batch; see `feed` for how long it is valid and what may be raised."""
        if self._is_over:
            raise StopIteration
        if not self._has_begun:
            self._begin()
        self._take_back()
        self._ask_ahead()
        begin = time.perf_counter()
        slot = self._ahead[0]
        if self._engine is None or slot.variable is None:
            self._source.load(slot)
        else:
            self._engine.wait(slot.variable)
        if self._is_closed:  # by another thread, meanwhile: what was loaded has not been kept
            raise StopIteration
        waited_s = time.perf_counter() - begin
        self._waited_s += waited_s
        TALLY.waited_ns += round(waited_s * 1e9)
        TALLY.batches += 1
        self._ahead.popleft()
        if self._carrier is None:
            self._source.lend(slot)
        if slot.error is not None:
            if isinstance(slot.error, StopIteration) and self._batches == self._batches_before:
                # A pass without any batch is most likely an iterator that was used up.
                slot.error = given_out(self._source.loader, self._batches) or slot.error
            self._stop(slot)
        if self._handover is not None:
            self._follow(self._handover, begin, waited_s)
        self._ask_ahead(limit=self._num_ahead)
        if self._carrier is not None:
            batch = self._carrier.receive(slot)
        else:
            batch, slot.content = slot.content, None
        self._lent.append(slot)
        self._batches += 1
        self._handed_s = time.perf_counter()
        return batch

    def report(self) -> CopyReport:
        """What was moved so far, and how much of it computation hid.

        Cost: On a GPU, waits for the work that was enqueued when the last batch was asked for.
        """
        loading_s = self._source.loading_s
        on_device = self._device.type != "cpu" and self._carrier is not None
        totals = Totals(compute_s=self._compute_s)
        if on_device and self._carrier is not None:
            totals = self._carrier.meter.totals()
            hidden = hidden_share(covered=totals.covered_s, total=totals.copy_s)
        else:
            hidden = hidden_share(covered=loading_s - self._waited_s, total=loading_s)
        return CopyReport(
            direction="in",
            device=str(self._device),
            batches=self._batches,
            num_bytes=self._carrier.num_bytes if self._carrier else 0,
            loading_s=loading_s,
            copy_s=totals.copy_s,
            compute_s=totals.compute_s,
            waited_s=self._waited_s,
            hidden=hidden,
            given_away=self._carrier.num_given_away if self._carrier else 0,
            bound=bounding_stage(
                loading_s=loading_s, copy_s=totals.copy_s, compute_s=totals.compute_s
            ),
        )

    def close(self) -> None:
        """End the loading and its thread; batches that are held stay valid. Safe to call twice."""
        self._is_closed = self._is_over = True
        self._source.is_over = True  # so that a thread that waits for a batch waits for no other
        # Who asks for a batch has it first, or is told the end; the loader itself must not wait for that.
        is_loading = self._source.thread == threading.get_ident()
        with contextlib.nullcontext() if is_loading else self._turn:
            if self._closing is not None:
                self._closing()
            self._ahead.clear()
            self._lent.clear()

    def _check_asker(self) -> None:
        self._source.check_asker()

    def _begin_again(self) -> None:
        """Make way for a new pass."""
        if self._source.is_one_shot:
            raise no_more(self._source.loader, self._batches)
        if not self._is_over:  # broken off: the caller asks for another batch than the one it had
            self._take_back()
            self._end()
        self._has_begun = self._is_over = False
        self._number += 1

    def _end(self) -> None:
        """End the pass; memory of fixed addresses stays for the next one."""
        self._is_over = self._is_claimed = True
        if self._closing is not None:
            self._closing.detach()
            self._closing = None
        end_loading(self._source, self._engine, self._slots, keeps_memory=self._is_fixed)
        self._engine = None
        self._ahead.clear()
        self._lent.clear()
        self._free = deque(self._slots)
        self._handed_s = self._asked_s = None
        self._close_with(None)

    def _begin(self) -> None:
        self._has_begun = True
        self._batches_before = self._batches
        self._is_over = True  # and so it stays if the loader cannot even begin
        self._source.open()  # here, because a DataLoader watches its workers from the main thread
        self._is_over = False
        if self._depth > 0 and (self._handover is None or self._handover.uses_thread):
            self._open_lane()
        else:
            self._close_with(None)

    def _follow(self, handover: Handover, asked_s: float, waited_s: float) -> None:
        """Report how long the step was that ended with this batch, and do as is decided then."""
        if self._asked_s is not None:
            handover.note(asked_s - self._asked_s, waited_s)
        self._asked_s = asked_s
        if handover.uses_thread and self._engine is None:
            self._open_lane()
        elif self._engine is not None and not handover.uses_thread and not self._ahead:
            self._close_lane(self._engine)

    def _open_lane(self) -> None:
        """From now on batches are loaded ahead, in another thread."""
        self._engine = Engine()
        self._source.thread = None  # that which loaded so far may wait for the new one
        self._position = self._engine.variable("position in the loader")
        for slot in self._slots:
            # A variable for each slot, so that one batch can be waited for without those behind it.
            slot.variable = self._engine.variable("slot of a feed")
        self._close_with(self._engine)

    def _close_lane(self, engine: Engine) -> None:
        """From now on batches are loaded when they are asked for; nothing is ahead."""
        engine.close()
        self._engine = None
        self._close_with(None)

    def _close_with(self, engine: Engine | None) -> None:
        """What ends the loading when the feed is closed or dropped."""
        if self._closing is not None:
            self._closing.detach()
        # Without a reference to this object: a feed that is dropped must end its thread.
        self._closing = weakref.finalize(self, shut_down, self._source, engine, self._slots)

    @property
    def _num_ahead(self) -> int:
        """Batches that are prepared while the caller works: none without a thread, or with one to end.

        Nor where one would be written over another.
        """
        is_kept = self._handover is None or self._handover.uses_thread
        if not self._source.own_memory.is_sure:
            return 0
        return self._depth if self._engine is not None and is_kept else 0

    def _take_back(self) -> None:
        """The caller asks for the next batch: what it had may be used again."""
        if self._handed_s is None:
            return
        self._compute_s += time.perf_counter() - self._handed_s
        self._handed_s = None
        moment = None
        if self._carrier is not None:
            # What the caller has enqueued so far may still read the batch.
            moment = self._carrier.channel.now()
            self._carrier.end_work(self._lent[-1], moment)
        while len(self._lent) > self._num_resting:
            slot = self._lent.popleft()
            if self._carrier is not None:
                self._carrier.free(slot, moment)
            self._free.append(slot)

    def _ask_ahead(self, limit: int | None = None) -> None:
        """Have further batches loaded, as far as slots and depth allow."""
        limit = max(1, self._num_ahead) if limit is None else limit
        while self._free and len(self._ahead) < limit:
            slot = self._free.popleft()
            self._ahead.append(slot)
            if self._engine and self._position and slot.variable:
                self._engine.push(
                    functools.partial(self._source.load, slot),  # must not keep the feed alive
                    writes=(self._position, slot.variable),
                    lane="loader",
                    name="load",
                )
