"""What a step changes in Python: whatever records the step once would never do it again.

A program that replaces the step renews nothing outside of its own tensors. A CUDA graph renews every tensor
of the capture, and copies are put under the names that held those, so that a loss kept to be shown is
renewed; but a hidden state that the next step reads, and a count, stay what they were at capture.
"""

from collections.abc import Callable
from typing import Any

import numpy
from torch import Tensor

from ridgeline.reach.differences import differences, have_same_places, members_of, parts_of
from ridgeline.reach.reach import BUFFERS, Reach
from ridgeline.reach.renewals import can_be_renewed
from ridgeline.reach.undo import StateChange, Undo

_ATOMS = (bool, int, float, complex, str, bytes, numpy.generic)
# No replay writes into arrays on the host.
_COUNTS = (*_ATOMS, numpy.ndarray, *BUFFERS)


def changed_in_python(
    before: Undo,
    is_read: Callable[[Tensor], bool] | None = None,
    is_anew: Callable[[StateChange], bool] = lambda _: False,
) -> str:
    """The first variable, entry or container that a step has changed, in words; empty where none was.

    A number that was replaced by an equal one is as it was.

    Args:
        before: The state before the step.
        is_read: Where given, whether the step read a tensor. What held only tensors that it did not read, and
            holds others now, counts as unchanged, unless it got one from another name, or a copy of it cannot
            be put there.
        is_anew: Whether a change is none to report: what is there now has nothing of what was there.
    """
    changes = [change for change in before.changes() if not is_anew(change)]
    if is_read is None:
        found = (change.what for change in changes if not _is_same(change.before, change.now))
        return next(found, "")
    differing = [[*differences(change.before, change.now)] for change in changes]
    left = {id(thing) for pairs in differing for old, new in pairs for thing in _replaced(old, new)}
    # Of all changes, as names hand tensors to one another in any order.
    for change, pairs in zip(changes, differing, strict=True):
        ends = [pair for pair in pairs if not (have_same_places(*pair) or _is_same(*pair))]
        is_shown = all(_is_shown(old, new, is_read) for old, new in ends)
        is_handed_on = any(id(thing) in left for _, new in ends for thing in _things(new))
        if not is_shown or is_handed_on or not can_be_renewed(change, before):
            return change.what
    return ""


def _replaced(before: Any, now: Any) -> list[Any]:
    """What an object was put in the place of: the one before, with its parts where these are others too."""
    return [before] if have_same_places(before, now) else _things(before)


def _is_same(before: Any, now: Any) -> bool:
    """Whether a number, or a text, was replaced by an equal one."""
    return isinstance(before, _ATOMS) and type(before) is type(now) and before == now


def _is_shown(before: Any, now: Any, is_read: Callable[[Tensor], bool]) -> bool:
    """Whether what was replaced is nothing that the step itself has used, and no number to count on from."""
    if any(is_read(tensor) for tensor in Reach(before).tensors):
        return False
    if before is None:
        return not any(isinstance(part, _COUNTS) for part in members_of(now))
    ends = (before, now)
    return now is not None and not any(isinstance(x, _COUNTS) or parts_of(x) for x in ends)


def _things(value: Any) -> list[Any]:
    """Tensors, and what has parts."""
    return [one for one in members_of(value) if isinstance(one, Tensor) or parts_of(one)]
