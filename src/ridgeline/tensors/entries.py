"""Entries of dictionaries, compared by identity at the speed of C: this runs before every step."""

from collections.abc import Iterable, Iterator
from itertools import chain
from operator import is_
from typing import Any, NamedTuple


class Change(NamedTuple):
    """An entry that holds another object than it did."""

    store: dict[Any, Any]
    key: Any
    before: Any


class Entries:
    """What some dictionaries (a module's parameters, say) hold at this moment, as objects.

    Args:
        stores: The dictionaries; kept, and so are the objects in them.
    """

    def __init__(self, stores: Iterable[dict[Any, Any]]) -> None:
        self._stores = list(stores)
        # Most dictionaries of a model are empty (a leaf's children, an activation's parameters).
        self._empty = [store for store in self._stores if not store]
        self._filled = [store for store in self._stores if store]
        self._sizes = [*map(len, self._filled)]
        self._owners = [store for store in self._stores for _ in store]
        self._keys = [key for store in self._stores for key in store]
        self.values = [value for store in self._stores for value in store.values()]

    def hold(self) -> bool:
        """Whether every dictionary has the same number of entries, with the same objects in order.

        Cost: 0.02 us an entry, 0.05 us a dictionary that has any, and 0.01 us an empty one.
        """
        if any(self._empty) or [*map(len, self._filled)] != self._sizes:
            return False
        # Sizes were compared before, since `map` stops at the shorter of both.
        return all(map(is_, chain.from_iterable(map(dict.values, self._filled)), self.values))

    def same_stores(self, stores: Iterable[dict[Any, Any]]) -> bool:
        """Whether these are the very dictionaries, in the same order."""
        now = list(stores)
        return len(now) == len(self._stores) and all(map(is_, now, self._stores))

    def same_sizes(self) -> bool:
        """Whether no entry was added or removed (one of each goes unnoticed here)."""
        return not any(self._empty) and [*map(len, self._filled)] == self._sizes

    def changes(self) -> Iterator[Change]:
        """The entries that hold something else now, or nothing."""
        for store, key, before in zip(self._owners, self._keys, self.values, strict=True):
            if store.get(key) is not before:
                yield Change(store, key, before)
