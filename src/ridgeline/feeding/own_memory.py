"""Whether the batches of a loader have memory of their own, or are all written to the same.

A loop that asks for one batch at a time does not see the difference. Loaded ahead, a batch would overwrite
the one that the loop has, or waits for.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from ridgeline.reach.reach import Reach, contents_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, dict, tuple, collections.deque)
LOOKED_AT = 64
"""Elements of each array by which it is known again, at most."""


class Contents:
    """What a list or dictionary holds: equal where that is the same objects, which live as long as this."""

    def __init__(self, container: Any) -> None:
        self._contents = contents_of(container)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Contents) or len(self._contents) != len(other._contents):
            return False
        return all(a is b for a, b in zip(self._contents, other._contents, strict=True))

    __hash__ = None  # type: ignore[assignment]


class Mark(NamedTuple):
    """A tensor, array or container of a batch: which, where, how often torch wrote into it, some of it."""

    number: int
    address: int
    version: int
    some: str | Contents


class OwnMemory:
    """Finds out from the first batches of a loader; these must not be loaded ahead.

    Loaders that load ahead themselves fill two or three places in turn, so as many are looked at as lie
    between a batch that the loop has and the one that is loaded meanwhile.

    Args:
        loader: Not asked where its batches are known to be made anew.
        depth: Batches that are to be loaded ahead.

    Attributes:
        makes_new: Whether each batch is known to be made anew, whatever the loader's own code does.
    """

    def __init__(self, loader: Iterable[Any], depth: int) -> None:
        self.makes_new = (
            isinstance(loader, DataLoader)
            and type(loader).__iter__ is DataLoader.__iter__  # else it may fill a place of its own
            and (loader.num_workers > 0 or loader.collate_fn is default_collate)
        )
        self._is_known: bool | None = True if self.makes_new else None
        self._depth, self._is_ahead = max(1, depth), depth > 0
        self._seen: list[tuple[set[int], Sequence[Any]]] = []

    @property
    def is_sure(self) -> bool:
        """Batches were seen to have memory of their own, or are known to."""
        return self._is_known is True

    def begin(self) -> None:
        """A pass begins: what its batches lie in may be its own, so that of an earlier one tells nothing."""
        self._seen = []

    def note(self, parts: Sequence[Any]) -> None:
        """See what of a batch is handed on as the loader gave it, not copied before the next one comes."""
        if self._is_known is not None:
            return
        places = _places_of(parts)
        if not all(places.isdisjoint(before) for before, _ in self._seen):
            self._is_known = False
        elif not places or len(self._seen) >= self._depth:
            self._is_known = True
        # With the parts, whose memory would be given to the next batch if nobody held it.
        self._seen = [*self._seen, (places, parts)] if self._is_known is None else []

    def marks(self, batch: Any) -> tuple[Mark, ...]:
        """What changes where the loader writes into a batch; nothing where none is loaded ahead.

        A loader may begin to use memory again later than its first batches show, such as one that grows with
        the longest batch so far.

        Cost: Some 20 us for each array of NumPy, and each tensor in the memory of one.
        """
        if self.makes_new or not (self._is_ahead and self.is_sure):
            return ()
        return tuple(map(_mark_of, _parts_of(batch)))

    def is_written_over(self, batch: Any, marks: tuple[Mark, ...], later: tuple[Mark, ...]) -> bool:
        """Whether a batch is not what its marks say any more, and a later one lies in its memory.

        The loop may write into a batch that it has, too, which then lies apart.
        """
        places = {mark.address for mark in marks} & {mark.address for mark in later} - {0}
        return bool(places) and marks != self.marks(batch)


def _parts_of(batch: Any) -> Iterator[Any]:
    """The tensors, arrays, lists and dictionaries of a batch, and what its objects hold; each once."""
    waiting, seen = [batch], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _PLAIN):
            continue
        seen.add(id(one))
        if isinstance(one, (Tensor, numpy.ndarray)):
            yield one
        elif isinstance(one, _CONTAINERS):
            if not isinstance(one, tuple):
                yield one
            waiting += contents_of(one)
        elif type(own := getattr(one, "__dict__", None)) is dict:
            yield own
            kinds = (Tensor, numpy.ndarray, *_CONTAINERS)
            waiting += [part for part in own.values() if isinstance(part, kinds)]


def _mark_of(leaf: Any) -> Mark:
    if isinstance(leaf, _CONTAINERS):
        return Mark(id(leaf), id(leaf), 0, Contents(leaf))
    if isinstance(leaf, numpy.ndarray):
        return Mark(id(leaf), leaf.ctypes.data, 0, "" if leaf.dtype.hasobject else _some_of(leaf))
    address = address_of(leaf)
    # Torch counts its own writes, and knows nothing of NumPy's.
    is_lent = bool(address) and not leaf.untyped_storage().resizable()
    version = 0 if leaf.is_inference() else leaf._version  # noqa: SLF001 - no other way
    return Mark(id(leaf), address, version, _some_of(leaf) if is_lent else "")


def _some_of(array: Any) -> str:
    """Some of the elements, from all over an array or a tensor; a text, in which NaN is equal to NaN."""
    most = max(2, int(LOOKED_AT ** (1 / max(1, array.ndim))))
    return str(
        array[tuple(slice(None, None, -(-size // most) or 1) for size in array.shape)].tolist()
    )


def _places_of(parts: Sequence[Any]) -> set[int]:
    """Where everything lies that can be written: elements of tensors and arrays, containers, objects.

    A loader may fill one list or one object of its own again and again, also with new tensors.
    """
    found = Reach(*parts)
    # What a class holds, and its code names, is the same for all of its objects.
    classes = Reach(*found.classes)
    shared = {*classes.seen, *(id(cell.owner) for cell in classes.cells)}
    held = [*found.stores, *found.buffers, *(cell.owner for cell in found.cells)]
    places = {id(one) for one in held} - shared
    places |= {array.ctypes.data for array in found.arrays if array.size}
    return (places | {*map(address_of, found.tensors)}) - {0}


def address_of(leaf: Any) -> int:
    """Where a tensor's numbers begin; 0 for one without any in one place (sparse), or what is no tensor."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or not leaf.numel():
        return 0
    try:
        return leaf.data_ptr()
    except RuntimeError:  # a wrapper of other tensors
        return 0
