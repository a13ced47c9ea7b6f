"""Feeding a step: batches are loaded, pinned and copied to the device while it computes.

A loader lane (a thread) stays up to `depth` batches ahead. For a GPU it copies every batch into a ring of
pinned memory and enqueues the transfer into a ring of device memory, on a stream of its own; the
consumer's stream waits for it on the device, and the ring waits, likewise, for the consumer's stream.
"""

import functools
import time
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

import torch

from ridgeline.errors import PlanError
from ridgeline.runtime.engine import Engine, Variable
from ridgeline.runtime.feeding.channel import Channel, CudaChannel, HostChannel
from ridgeline.runtime.feeding.handover import Handover
from ridgeline.runtime.feeding.meter import Totals
from ridgeline.runtime.feeding.report import CopyReport, bounding_stage, hidden_share
from ridgeline.runtime.feeding.slots import Carrier, Slot
from ridgeline.runtime.feeding.source import Source, shut_down
from ridgeline.runtime.feeding.stream import Stream
from ridgeline.runtime.gaps import TALLY


def feed(
    loader: Iterable[Any],
    device: torch.device | str | None = None,
    depth: int = 2,
    *,
    fixed_addresses: bool = False,
    handover: Handover | None = None,
) -> "Feed":
    """The batches of `loader` on `device`, in order, prepared ahead.

    A batch is ready for work on the stream that is current where it is asked for, and its memory is
    used again only after what that stream had been given when a later batch was asked for; work on
    other streams must have been joined to it by then.

    Args:
        loader: Any iterable of nests of tensors, such as a DataLoader. Iterated in one other thread.
        device: Where the batches go; None takes the current GPU, or the CPU where there is none.
        depth: Batches prepared ahead; 0 does everything in the caller's thread.
        fixed_addresses: Use `depth` buffers in turn, of which the caller has one, so that every leaf
            has at most `depth` addresses (a smaller batch is a view; a larger one than any before
            moves the buffer). A batch is then valid until the next one is asked for. Otherwise a
            batch is valid as long as it, or a view of it, is referenced; a buffer that is still held
            when its turn comes is left to its holder and replaced.
        handover: On the CPU, finds out whether the loading thread pays, and does without where it does not;
            for loaders that any thread may iterate. Feeds that follow each other share it. None: always
            a thread, but for lists and tuples, whose batches are there already.

    Returns:
        An iterator of batches, for one pass (make a feed in every epoch), which is a context manager and has
        `close()` and `report()`. On the CPU
        the batches are those of the loader, not copies, unless addresses are fixed. Tensors on other
        devices, sparse ones, subclasses and those that require gradients are copied when handed over.

    Raises:
        PlanError: `loader` cannot be iterated; `depth` is no whole number, negative, or 0 with fixed
            addresses; the device is neither CPU nor CUDA, or torch cannot use it.
        Exception: in the iteration, whatever the loader raises, unchanged, at the batch where it
            happened.

    Cost: `depth + 2` batches of pinned memory and of device memory, or `depth` with fixed addresses.
        Waits on the host only when no batch is ready.
    """
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise PlanError(
            f"wanted an iterable of batches, got {type(loader).__name__} in feed(...); pass a DataLoader or "
            "a generator"
        )
    least = 1 if fixed_addresses else 0
    if not isinstance(depth, int) or depth < least:
        wanted = (
            f"a whole depth >= {least}{' with fixed_addresses=True' if fixed_addresses else ''}"
        )
        raise PlanError(f"wanted {wanted}, got {depth!r} in feed(...); 2 serves most loaders")
    place = _place(device)
    channel: Channel | None = None
    if place.type == "cuda":
        channel = CudaChannel(place, inward=True)
    elif fixed_addresses:
        channel = HostChannel()
    if channel is not None:
        handover = None
    elif type(loader) in (list, tuple):
        depth = 0
    return Feed(loader, place, depth, channel, fixed_addresses=fixed_addresses, handover=handover)


class Feed(Stream):
    """Batches on their device, in order; made by `rl.feed`.

    Loading begins with the first batch asked for. A loop that breaks off needs no `close()`: dropping
    the feed ends its thread.
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
        num_slots = depth if fixed_addresses else depth + 2
        self._device = device
        self._depth = depth
        self._handover = handover if depth > 0 else None
        # A loop still refers to its last batch while it asks for the next: that slot rests one round.
        self._num_resting = 0 if fixed_addresses else 1
        self._carrier = (
            None
            if channel is None
            else Carrier(channel, fixed_addresses=fixed_addresses, margin=num_slots)
        )
        self._source = Source(loader, self._carrier)
        self._slots = [Slot() for _ in range(num_slots)]
        self._free: deque[Slot] = deque(self._slots)
        self._ahead: deque[Slot] = deque()
        self._lent: deque[Slot] = deque()
        self._has_begun = False
        self._engine: Engine | None = None
        self._position: Variable | None = None
        self._closing: weakref.finalize[..., Self] | None = None
        self._is_over = False
        self._batches = 0
        self._waited_s = 0.0
        self._compute_s = 0.0
        self._handed_s: float | None = None
        self._asked_s: float | None = None

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
        waited_s = time.perf_counter() - begin
        self._waited_s += waited_s
        TALLY.waited_ns += round(waited_s * 1e9)
        TALLY.batches += 1
        self._ahead.popleft()
        if slot.error is not None:
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
        self._is_over = True
        if self._closing is not None:
            self._closing()
        self._ahead.clear()
        self._lent.clear()

    def _begin(self) -> None:
        self._has_begun = True
        self._is_over = True  # and so it stays if the loader cannot even begin
        self._source.open()  # here, because a DataLoader watches its workers from the main thread
        self._is_over = False
        if self._depth > 0 and (self._handover is None or self._handover.uses_thread):
            self._open_lane()
        else:
            self._close_with(None)

    def _follow(self, handover: Handover, asked_s: float, waited_s: float) -> None:
        """Tell how long the step was that ended with this batch, and do as is decided then."""
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
        self._closing = weakref.finalize(self, shut_down, self._source, engine, self._slots)

    @property
    def _num_ahead(self) -> int:
        """Batches that are prepared while the caller works: none without a thread, or with one to end."""
        is_kept = self._handover is None or self._handover.uses_thread
        return self._depth if self._engine is not None and is_kept else 0

    def _take_back(self) -> None:
        """The caller asks for the next batch: what it had may be used again."""
        if self._handed_s is None:
            return
        self._compute_s += time.perf_counter() - self._handed_s
        self._handed_s = None
        moment = None
        if self._carrier is not None:
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


def _place(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:  # no such name, no name at all
        raise PlanError(
            f"wanted a CPU or CUDA device, got {device!r} in feed(...); name it 'cpu', 'cuda' or 'cuda:0'"
        ) from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            f"wanted a CUDA device that torch can use for feed(...), got {place} without one; feed to 'cpu', "
            "or install a build of torch for this GPU"
        )
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if place.type not in ("cpu", "cuda"):
        raise PlanError(
            f"wanted a CPU or CUDA device, got {place} in feed(...); this release copies to no other"
        )
    return place
