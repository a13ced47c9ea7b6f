"""Whether what a program reads is still what it was: the test that runs before every captured call.

Everything that it compares is laid out beforehand in flat lists, which loops of the interpreter's C code go
through: tensors by the address of their data; everything else by identity, or by type and value where it is
a plain value that was assigned anew.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

from torch import Tensor

Store = dict[Any, Any]
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_END = object()
_contents: Callable[[types.CellType], Any] = attrgetter("cell_contents")


def is_plain(value: Any) -> bool:
    """Whether a value cannot change and is compared by what it is: a number, text, None, tuples of those."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)


class Places:
    """Places that a program reads: entries of dictionaries, and variables of closures."""

    def __init__(self) -> None:
        self.stores: list[Store] = []
        self.names: list[str] = []
        self.cells: list[types.CellType] = []
        self._seen: set[tuple[int, str]] = set()

    def add(self, store: Store | types.CellType, name: str) -> None:
        """Add `store[name]`, or the variable that is the cell; once."""
        key = (id(store), "" if isinstance(store, types.CellType) else name)
        if key in self._seen:
            return
        self._seen.add(key)
        if isinstance(store, types.CellType):
            self.cells.append(store)
        else:
            self.stores.append(store)
            self.names.append(name)

    def rows(self, after: Sequence[Iterable[Any]]) -> Callable[[], Sequence[Iterable[Any]]]:
        """A function that gives rows of what is there now, those of `after` last.

        Reading the rows raises LookupError or ValueError where a place is gone.
        """
        stores, names, groups = _grouped(self.stores, self.names)
        cells, get = self.cells, dict.get
        if not self.stores and not cells:
            return lambda: after

        def read() -> list[Iterable[Any]]:
            found: list[Iterable[Any]] = [map(get, stores, names)]
            for getter, same in groups:
                found += map(getter, same)
            if cells:
                found.append(map(_contents, cells))
            found += after
            return found

        return read


class Watched:
    """What a program reads, by the way in which it is watched.

    Attributes:
        tensor_views: Live views of dictionaries that hold only tensors: parameters, buffers.
        tensor_places: Other places of tensors.
        held: Tensors in containers that are watched themselves.
        places: Places of everything else.
        containers: Live views of lists, dictionaries and the like, watched for what they contain.
        empty: Dictionaries that were empty and have to stay so; of hooks, say.
    """

    def __init__(self) -> None:
        self.tensor_views: list[Iterable[Tensor | None]] = []
        self.tensor_places = Places()
        self.held: list[Tensor] = []
        self.places = Places()
        self.containers: list[Iterable[Any]] = []
        self.empty: list[Store] = []

    def tensors(self) -> list[Tensor]:
        """Every tensor once, as it is now."""
        found = chain.from_iterable(self._tensor_rows()())
        return list({id(t): t for t in found if isinstance(t, Tensor)}.values())

    def values(self) -> tuple[Any, ...]:
        """The plain values as they are now."""
        return tuple(filter(is_plain, self._things()))

    def watch(self) -> Callable[[], bool]:
        """A function that says whether everything is as it is at this moment.

        Cost: 0.05 us for each tensor, value and module. It runs in every call.
        """
        tensors, things = self._tensor_rows(), self._rows()
        flat, address = chain.from_iterable, Tensor.data_ptr
        addresses, before, empty = self._addresses(), list(flat(things())), self.empty

        def is_unchanged() -> bool:
            try:
                if list(map(address, flat(tensors()))) != addresses or any(empty):
                    return False
                if all(map(is_, flat(things()), before)):
                    return True
                now = list(flat(things()))
            except (
                TypeError,
                LookupError,
                ValueError,
            ):  # a parameter, attribute or variable is gone
                return False
            if not _is_same(now, before):
                return False
            before[:] = now  # equal numbers that were assigned anew: next time they are identical
            return True

        return is_unchanged

    def _addresses(self) -> list[int] | None:
        """Where the tensors' data lie now; None where one is gone."""
        try:
            return list(map(Tensor.data_ptr, chain.from_iterable(self._tensor_rows()())))
        except (TypeError, LookupError, ValueError):
            return None

    def _things(self) -> list[Any]:
        """Everything but tensors as it is now, None where nothing is."""
        found = [*map(dict.get, self.places.stores, self.places.names)]
        found += map(_contents_or_none, self.places.cells)
        return [*found, *chain.from_iterable(_marked(self.containers))]

    def _tensor_rows(self) -> Callable[[], Sequence[Iterable[Any]]]:
        return self.tensor_places.rows([*self.tensor_views, self.held])

    def _rows(self) -> Callable[[], Sequence[Iterable[Any]]]:
        return self.places.rows(_marked(self.containers))


def _marked(containers: list[Iterable[Any]]) -> list[Iterable[Any]]:
    """The containers with marks between them: no element can go from one to the next unnoticed."""
    return [part for container in containers for part in (container, (_END,))]


def _grouped(
    stores: list[Store], names: list[str]
) -> tuple[list[Store], list[str], list[tuple[Callable[[Store], Any], list[Store]]]]:
    """Single entries, and dictionaries of which the same several names are read.

    The modules of a class are read by one loop: that takes half the time of entry by entry.
    """
    by_store: dict[int, tuple[Store, list[str]]] = {}
    for store, name in zip(stores, names, strict=True):
        by_store.setdefault(id(store), (store, []))[1].append(name)
    groups: dict[tuple[str, ...], list[Store]] = {}
    singles: list[tuple[Store, str]] = []
    for store, wanted in by_store.values():
        there = tuple(name for name in wanted if name in store)
        if len(there) > 1:
            groups.setdefault(there, []).append(store)
        singles += [(store, name) for name in wanted if len(there) < 2 or name not in store]
    getters: list[tuple[Callable[[Store], Any], list[Store]]] = [
        (itemgetter(*wanted), same) for wanted, same in groups.items()
    ]
    return [store for store, _ in singles], [name for _, name in singles], getters


def _is_same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether each thing is the same object, or a plain value of the same type and value."""
    return len(now) == len(before) and all(
        new is old or (is_plain(new) and _typed(new) == _typed(old))
        for new, old in zip(now, before, strict=True)
    )


def _typed(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value), tuple(map(_typed, value))
    return type(value), value


def _contents_or_none(cell: types.CellType) -> Any:
    """What a closure's variable holds; None before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return None
