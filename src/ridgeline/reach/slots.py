"""Where an object stands in what can be reached, so that another one may take its place for a while."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import load, put_at, store_in

Slot = Callable[[Any], None]
"""Puts an object to a place."""


def slots_holding(value: Any, reach: Reach) -> list[Slot]:
    """For each variable, entry and element that holds this very object, what puts another one there."""
    found: list[Slot] = [partial(store_in, cell) for cell in reach.cells if load(cell) is value]
    for store in reach.stores:
        if isinstance(store, set):  # in which nothing has a place
            continue
        entries = dict.items(store) if isinstance(store, dict) else enumerate(store)
        found += [partial(put_at, store, key) for key, held in entries if held is value]
    return found


@contextlib.contextmanager
def standing_in(slots: Sequence[Slot], value: Any, original: Any) -> Iterator[None]:
    """Inside, `value` stands in these places; afterwards the original does again."""
    try:
        for put in slots:
            put(value)
        yield
    finally:
        for put in slots:
            put(original)
