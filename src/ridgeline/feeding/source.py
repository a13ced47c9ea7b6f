"""The loader behind a feed: taken from in one thread, its errors kept for the batch where they happened."""

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

from ridgeline.engine import Engine
from ridgeline.errors import PlanError
from ridgeline.feeding.own_memory import Mark, OwnMemory
from ridgeline.feeding.slots import Carrier, Slot

_NOTHING: tuple[Any, tuple[Mark, ...]] = (None, ())


class Source:
    """The loader, and how to fill a slot from it; used by one thread at a time."""

    def __init__(self, loader: Iterable[Any], carrier: Carrier | None, depth: int) -> None:
        self.loader = loader
        self._carrier = carrier
        self.own_memory = OwnMemory(loader, depth)
        self._iterator: Iterator[Any] | None = None
        self.is_over = False
        self.is_one_shot = False
        self.loading_s = 0.0
        self.thread: int | None = None
        self._loads_in: int | None = None
        self._lent: tuple[Any, tuple[Mark, ...]] = _NOTHING

    def open(self) -> None:
        """Begin an iteration; then it is known whether there can be another."""
        self.is_over = False
        self.thread = None
        self.own_memory.begin()
        self._iterator = iter(self.loader)
        # An iterator gives itself: there is no second pass over it, unless to ask it anew begins again.
        self.is_one_shot = self._iterator is self.loader and not _begins_again(self.loader)

    def load(self, slot: Slot) -> None:
        """Fill a slot with the next batch, or with what the loader raised."""
        if self.is_over or self._iterator is None:
            return
        self.thread = self._loads_in = threading.get_ident()
        # The loader's own exception belongs to the caller, at this batch and not before.
        try:
            if self._carrier is None:
                begin = time.perf_counter()
                slot.content = next(self._iterator)
                self.own_memory.note([slot.content])
                slot.marks = self.own_memory.marks(slot.content)
                if self.own_memory.is_written_over(*self._lent, slot.marks):
                    raise _written_over()
            else:
                with self._carrier.channel.active():
                    self._carrier.wait_for_host_memory(slot)
                    if not self.own_memory.makes_new:
                        self._carrier.wait_for_loader_memory()
                    begin = time.perf_counter()
                    self.own_memory.note(self._carrier.pack(slot, next(self._iterator)))
            self.loading_s += time.perf_counter() - begin
        except BaseException as error:  # noqa: BLE001 - StopIteration too: it ends the feed
            self.is_over = True
            slot.error = error
        finally:
            self._loads_in = None

    def check_asker(self) -> None:
        """Raise a PlanError where the loader asks for a batch of the feed that it is loading for."""
        if self._loads_in == threading.get_ident():
            raise PlanError(
                "wanted a loader that does not ask for batches of its own feed, got one that does, in "
                "feed(...), which would wait for itself; give it a loader of its own"
            )

    def lend(self, slot: Slot) -> None:
        """The loop gets a batch; an error in its place if the loader wrote over it while it waited."""
        if slot.error is None:
            self._lent = (slot.content, slot.marks) if slot.marks else _NOTHING
            if slot.marks != self.own_memory.marks(slot.content):
                slot.error = _written_over()
        slot.marks = ()  # which hold what was in the batch

    def finish(self, slots: list[Slot], *, keeps_memory: bool) -> None:
        """Drop the iterator and what the slots hold; a generator that the loader made is closed."""
        for slot in slots:
            slot.content = slot.error = None
            if self._carrier is not None and not keeps_memory:
                self._carrier.end(slot)
        iterator, self._iterator, self._lent = self._iterator, None, _NOTHING
        # Closed here, in order, and not whenever it is collected; the user's own generator is left alone.
        if isinstance(iterator, GeneratorType) and iterator is not self.loader:
            iterator.close()


def _written_over() -> PlanError:
    return PlanError(
        "wanted batches that stay as they are, got a loader that wrote into one of before while it was "
        "loaded ahead, in feed(...); have it make each anew (a clone() is one), or use depth=0"
    )


def _begins_again(iterator: Iterable[Any]) -> bool:
    """Whether what gives itself may go back to its first batch for that, as `__iter__` of many loaders does.

    Code that uses no name returns what it is given, and changes nothing.
    """
    code = getattr(type(iterator).__iter__, "__code__", None)
    return code is not None and bool(code.co_names)


def end_loading(
    source: Source, engine: Engine | None, slots: list[Slot], *, keeps_memory: bool
) -> None:
    """End an iteration; what has begun is finished first, what has not is left out."""
    source.is_over = True  # loads that have not begun do nothing
    if engine is not None:
        engine.close()
    source.finish(slots, keeps_memory=keeps_memory)


def shut_down(source: Source, engine: Engine | None, slots: list[Slot]) -> None:
    """End the loading for good, whichever thread this is."""
    source.is_over = True  # at once, also where another thread does the rest
    end = functools.partial(end_loading, source, engine, slots, keeps_memory=False)
    if source.thread == threading.get_ident() and engine is not None:
        # The garbage collector may drop a feed in its own loading thread, which cannot await itself.
        threading.Thread(target=end, name="ridgeline-close-feed").start()
    else:
        end()
