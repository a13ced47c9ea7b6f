"""What a step puts under names: an attribute, a list's element, shown to later readers.

A replay writes into the tensors of the capture, and puts nothing under a name. What is under names after it
are copies, since readers may keep it (a history of logged losses), and the next replay writes there again.
"""

import copy
from collections import ChainMap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import ObstacleError
from ridgeline.reach.differences import members_of, parts_of
from ridgeline.reach.reach import Reach, is_leaf
from ridgeline.reach.undo import StateChange, Undo


def renewals(before: Undo) -> list[Callable[[], object]]:
    """A call that puts copies of what is under names now there again, where a step has put tensors.

    One tensor under two names stays one, and what holds tensors (tuples, lists, dictionaries, objects of any
    class) is made anew, too. What was there before the step stays, and so do tensors in its memory.

    Returns:
        The call, to be made after each replay; nothing where there is no such name.

    Raises:
        ObstacleError: what is under a name cannot be copied; names it.

    Cost: Holds those tensors, so that their memory is not reused; each call copies them.
    """
    shown = [change for change in before.changes() if _shown_tensors(change, before)]
    for change in shown:
        if not can_be_renewed(change, before):
            raise ObstacleError(
                f"wanted what the step shows in tensors, or in objects that copy.deepcopy copies, got "
                f"{type(change.now).__name__} in {change.what}, whose tensors the next replay writes over; "
                "show the tensors themselves, or use an execution mode without a graph"
            )
    if not shown:
        return []
    tensors = {id(t): t for change in shown for t in _shown_tensors(change, before)}
    return [partial(_renew, shown, [*tensors.values()], before)]


def can_be_renewed(change: StateChange, before: Undo) -> bool:
    """Whether copies of the tensors that a step has put under a name can stand there in their place."""
    tensors = _shown_tensors(change, before)
    if not tensors:
        return True
    if change.put is None:
        return False
    try:
        copied = _copied(change.now, {id(t): t.detach() for t in tensors}, before)
    except Exception:  # noqa: BLE001 - a user's class may raise anything where it is copied
        return False
    mine = {*map(id, tensors)}
    return not any(id(tensor) in mine for tensor in _tensors_in(copied, before))


def _shown_tensors(change: StateChange, before: Undo) -> list[Tensor]:
    """The tensors in it that were not there before the step, neither they nor their memory."""
    return [t for t in _tensors_in(change.now, before) if not before.has_memory_of(t)]


def _tensors_in(value: Any, before: Undo) -> Iterator[Tensor]:
    """The tensors in a value, those that functions in it hold, too; not those of what was there before."""
    for member in members_of(value, before.has):
        if isinstance(member, Tensor):
            yield member
        elif not parts_of(member):
            yield from (tensor for tensor in Reach(member).tensors if not before.has(tensor))


def _renew(shown: Sequence[StateChange], tensors: Sequence[Tensor], before: Undo) -> None:
    # What autograd knows of the tensors of the capture it knows of their copies.
    with torch.enable_grad():
        copies: dict[int, Any] = {id(tensor): tensor.clone() for tensor in tensors}
    for change in shown:
        assert change.put is not None
        change.put(_copied(change.now, copies, before))


def _copied(value: Any, copies: dict[int, Any], before: Undo) -> Any:
    """The value with objects of its own, but for those that were there before; `copies` receives them."""
    return copy.deepcopy(value, ChainMap(copies, before.reached))  # type: ignore[arg-type] - a dict in all but name


def letting_go(before: Undo) -> Callable[[], None]:
    """A call that takes from the tensors that a step has shown what autograd keeps of how they were made.

    That would keep where the gradients of parameters are added up, too, with the stream on which it was made:
    the next step, which makes those tensors again, would add on that stream, and could not be captured. So it
    is for right before that step; what other code has put under a name by then stays.

    Args:
        before: The state before the step that has just run; kept as long as the call is.
    """
    shown = [change.now for change in before.changes()]

    def let_go() -> None:
        for change in before.changes():
            if change.put is None or not any(change.now is one for one in shown):
                continue
            tensors = [tensor for tensor in Reach(change.now).tensors if not is_leaf(tensor)]
            if tensors and can_be_renewed(change, before):
                copies: dict[int, Any] = {id(tensor): tensor.detach() for tensor in tensors}
                change.put(_copied(change.now, copies, before))

    return let_go
