"""Gradients that are ready before the program that computes them is over.

A compiled backward pass is one node to autograd, which hands its gradients out when all of it has been
issued. On a GPU that says nothing about when they are computed: inside a captured graph least of all. So
operators in compiled programs leave an event with each result of theirs, and who wants to send a gradient
waits for that event instead of for the stream.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Ready(NamedTuple):
    """A result and when it is ready: its place in the order of results, and the event on a GPU."""

    number: int
    event: Any
    version: int
    storage: StorageWeakRef


_results: dict[tuple[int, int], Ready] = {}
_is_watched = False


def watch() -> None:
    """From here on results are noted; those noted before are forgotten."""
    global _is_watched  # noqa: PLW0603 - operators inside compiled programs have no other channel
    _is_watched = True
    _results.clear()


def unwatch() -> None:
    """Forget all results, and note none."""
    global _is_watched  # noqa: PLW0603
    _is_watched = False
    _results.clear()


def note(result: Tensor) -> None:
    """The result is ready when the current stream comes to this point. Called by operators.

    Cost: An event, while somebody watches; else nothing.
    """
    if not _is_watched:
        return
    event = torch.cuda.current_stream(result.device).record_event() if result.is_cuda else None
    # The weak reference also keeps the storage's identity from being that of another one later.
    storage = StorageWeakRef(result.untyped_storage())
    _results[_key(result)] = Ready(len(_results), event, result._version, storage)  # noqa: SLF001


def look_up(gradient: Tensor) -> Ready | None:
    """When a gradient was ready; None if nobody noted it, or it was changed since (added to, scaled)."""
    found = _results.get(_key(gradient)) if _results else None
    if found is None or found.version != gradient._version:  # noqa: SLF001
        return None
    return found


def _key(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, tensor.data_ptr()  # noqa: SLF001
