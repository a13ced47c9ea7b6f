"""What a step changes in Python: whatever records the step once would never do it again.

A program that replaces the step renews nothing outside of its own tensors. A CUDA graph renews every tensor
of the capture, those that an attribute or a list still holds too, so that a loss kept to be shown is
renewed; but a hidden state that the next step reads, and a count, stay what they were at capture.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.reach.reach import BUFFERS, Reach
from ridgeline.reach.undo import StateChange, Undo

_ATOMS = (type(None), bool, int, float, complex, str, bytes)


def changed_in_python(before: Undo, is_read: Callable[[Tensor], bool] | None = None) -> str:
    """The first variable, entry or container that a step has changed, in words; empty where none was.

    A number that was replaced by an equal one is as it was.

    Args:
        before: The state before the step.
        is_read: Where given, whether the step read a tensor. What held only tensors that it did not read, and
            holds others now, counts as unchanged, unless it got one from another name.
    """
    changes = [*before.changes()]
    # Of all changes, as names hand tensors to one another in any order.
    left = {id(tensor) for change in changes for tensor in _tensors(change.before)}
    for change in changes:
        if _is_equal(change):
            continue
        if is_read is None or not _is_shown(change, is_read) or _is_handed_on(change, left):
            return change.what
    return ""


def _is_equal(change: StateChange) -> bool:
    kinds = {type(change.before), type(change.now)}
    return len(kinds) == 1 and kinds <= {*_ATOMS} and change.before == change.now


def _is_shown(change: StateChange, is_read: Callable[[Tensor], bool]) -> bool:
    """Whether what was replaced is nothing that the step itself has used."""
    before, now = change.before, change.now
    if (
        isinstance(now, (numpy.ndarray, *BUFFERS)) and now is not before
    ):  # no replay writes on the host
        return False
    if any(is_read(tensor) for tensor in Reach(before).tensors):
        return False
    numbers = [[*_numbers(value)] for value in (before, now)]
    # Where nothing was kept before, or only tensors were, there is nothing to count on from.
    return numbers[0] == numbers[1] and _shape(before) in (None, _shape(now))


def _is_handed_on(change: StateChange, left: set[int]) -> bool:
    """Whether a name got a tensor that another held before (what the last step showed), as no replay does."""
    before, now = _tensors(change.before), _tensors(change.now)
    stayed = {id(a) for a, b in zip(before, now, strict=False) if a is b}
    return any(id(tensor) in left - stayed for tensor in now)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _numbers(value: Any) -> Iterator[Any]:
    leaves: Iterable[Any] = pytree.tree_leaves(value)
    return (leaf for leaf in leaves if leaf is not None and isinstance(leaf, _ATOMS))


def _shape(value: Any) -> Any:
    """How many leaves there are; None of nothing."""
    return None if value is None else len(pytree.tree_leaves(value))
