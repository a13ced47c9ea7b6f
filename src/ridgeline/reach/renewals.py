"""What a step puts under names: an attribute, a list's element, shown to later readers.

A replay writes into the tensors of the capture, and puts nothing under a name. What is under names after it
are copies, since readers may keep it (a history of logged losses), and the next replay writes there again.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import StateChange, Undo


def renewals(before: Undo) -> list[Callable[[], object]]:
    """A call that puts copies of what is under names now there again, where a step has put tensors.

    One tensor under two names stays one, and tuples, lists, dictionaries and dataclasses around tensors are
    made anew, too. Other objects of a class of the user's stay, with the tensors of the capture in them.

    Args:
        before: The state before the step.

    Returns:
        The call, to be made after each replay; nothing where there is no such name.

    Cost: Holds those tensors, so that their memory is not reused; each call copies them.
    """
    shown = [
        change
        for change in before.changes()
        if change.put is not None and Reach(change.now).tensors
    ]
    return [partial(_renew, shown, before)] if shown else []


def _renew(shown: Sequence[StateChange], before: Undo) -> None:
    copies: dict[int, Tensor] = {}
    # What autograd knows of the tensors of the capture it knows of their copies.
    with torch.enable_grad():
        for change in shown:
            assert change.put is not None
            change.put(_copied(change.now, before, copies))


def _copied(value: Any, before: Undo, copies: dict[int, Tensor]) -> Any:
    """The value with copies of the tensors that were not there before, of each one."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if before.has(leaf):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.clone()
            return copies[id(leaf)]
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        made = copy.copy(leaf)
        for field in fields(leaf):
            held = getattr(leaf, field.name, None)
            # Past the class's own `__setattr__`, by which frozen ones refuse.
            object.__setattr__(made, field.name, _copied(held, before, copies))
        return made

    return pytree.tree_map(copied, value)


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
            if any(not tensor.is_leaf for tensor in Reach(change.now).tensors):
                change.put(pytree.tree_map_only(Tensor, Tensor.detach, change.now))

    return let_go
