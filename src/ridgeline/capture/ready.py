"""Gradients that are ready before the program that computes them is over.

A compiled backward pass is one node to autograd, which hands its gradients out when all of it has been
issued. On a GPU that says nothing about when they are computed: inside a captured graph least of all. So
operators in compiled programs leave an event with each result of theirs, and who wants to send a gradient
waits for that event instead of for the stream.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Ready(NamedTuple):
    """A result and when it is ready: its place in the order of results, its program, the event on a GPU."""

    number: int
    program: int
    event: Any
    version: int
    storage: StorageWeakRef


_results: dict[tuple[int, int], Ready] = {}
_places: dict[tuple[int, int], Tensor] = {}
_is_watched = False


def watch(places: Mapping[tuple[int, int], Tensor] | None = None) -> None:
    """From here on results are noted; those noted before are forgotten.

    Args:
        places: Where a result may be put, by its number and program.
    """
    global _is_watched  # noqa: PLW0603 - operators inside compiled programs have no other channel
    _is_watched = True
    _results.clear()
    _places.clear()
    _places.update(places or {})


def unwatch() -> None:
    """Forget all results, and note none."""
    global _is_watched  # noqa: PLW0603
    _is_watched = False
    _results.clear()
    _places.clear()


def place(
    program: int,
    shape: Sequence[int],
    strides: Sequence[int],
    like: Tensor,
    dtype: torch.dtype,
    ahead: int = 0,
) -> Tensor:
    """Memory for the next result: where its receiver wants it, if that is laid out so, else fresh.

    `ahead` results are noted before it; the memory is on the device of `like`. See `note`.
    """
    # By number, since a captured program makes its results in the same order each time.
    wanted = _places.get((len(_results) + ahead, program))
    layout = (tuple(shape), tuple(strides), dtype)
    if wanted is not None and (tuple(wanted.shape), wanted.stride(), wanted.dtype) == layout:
        return wanted.detach()  # what takes it as a gradient must hold the only reference
    return like.new_empty_strided(shape, strides, dtype=dtype)


def note(result: Tensor, program: int = 0) -> None:
    """The result is ready when the current stream comes to this point. Called by operators.

    Args:
        result: A tensor that a compiled program hands out.
        program: Distinguishes this program from others.

    Cost: An event, while it is watched; else nothing.
    """
    if not _is_watched:
        return
    event = torch.cuda.current_stream(result.device).record_event() if result.is_cuda else None
    # The weak reference also keeps the storage's identity from being that of another one later.
    storage = StorageWeakRef(result.untyped_storage())
    version = result._version  # noqa: SLF001
    _results[_key(result)] = Ready(len(_results), program, event, version, storage)


def look_up(gradient: Tensor) -> Ready | None:
    """When a gradient was ready; None if not recorded, or if it was changed since (added to, scaled)."""
    found = _results.get(_key(gradient)) if _results else None
    if found is None or found.version != gradient._version:  # noqa: SLF001
        return None
    return found


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr()  # noqa: SLF001
