"""Hooks on gradients that change something in Python: in which order they are called then shows.

A compiled or replayed program hands out the gradients of its parameters at its end, in an order of its own.
For hooks that look at their own gradient alone (that scale or clip it, say) the order is of no account.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ridgeline.errors import CaptureError
from ridgeline.reach.loss import scalar_loss
from ridgeline.reach.owners import is_machinery
from ridgeline.reach.reach import Reach, contents, is_leaf
from ridgeline.reach.undo import Undo, undone
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.tensors.copies import own_copy

_OF_SEVERAL = torch.autograd.graph.__file__
"""Where the code lies with which torch calls a hook once several gradients are there."""
_OF_FIRST = "wrapped_fn"
"""Its function for a hook that is called with the first one of them."""


class _Hook(NamedTuple):
    """A hook of the user's: its tensor, where it hangs there, what torch calls, and what that calls."""

    tensor: int
    place: dict[int, Any]
    key: int
    given: Any
    own: Any


def num_hooks(body: StepBody) -> int:
    """How many hooks there are on gradients of the model's parameters, anew for each module that shares one.

    Cost: 0.2 us a parameter or module, a fifth of what a walk through `parameters()` takes, in every step.
    """
    count, modules, seen = 0, [body.model], set[nn.Module]()
    while modules:
        module = modules.pop()
        if module in seen:
            continue
        seen.add(module)
        for tensor in module._parameters.values():  # noqa: SLF001 - without names
            # Both written out: a call for each parameter would take longer than all else here.
            if tensor is not None:
                count += len(tensor._backward_hooks or ())  # noqa: SLF001 - torch's own
                count += len(tensor._post_accumulate_grad_hooks or ())  # noqa: SLF001
        modules += [inner for inner in module._modules.values() if inner is not None]  # noqa: SLF001
    return count


def check_hook_order(body: StepBody, batch: Any) -> None:
    """Refuse a form that calls hooks on gradients in another order, where that shows.

    Args:
        body: The step, whose form hands out gradients in an order of its own.
        batch: An example; tensors in it are copied.

    Raises:
        CaptureError: hooks on several gradients change something in Python, or one is for the first gradient
            of several; names a parameter.

    Cost: Where there are hooks, a step without its optimizer, undone, and the memory of all it can reach.
    """
    leaves = [t for t in Reach(body.model, body.loss_fn).tensors if is_leaf(t) and t.requires_grad]
    found = {id(tensor): [*_hooks_of(tensor)] for tensor in leaves}
    hooks = [hook for held in found.values() for hook in held]
    names = {id(parameter): name for name, parameter in body.model.named_parameters()}
    for number, held in found.items():
        if any(_code(hook.given) == (_OF_SEVERAL, _OF_FIRST) for hook in held):
            _refuse(body, "one for the first gradient of several", names.get(number))
    if len({_unit(hook) for hook in hooks}) < 2:
        return
    changing = _changing(body, batch, hooks)
    units = Counter(
        _unit(hook) for hook in hooks if getattr(hook.own, "__code__", None) in changing
    )
    if len(units) > 1:
        first = next(n for n, held in found.items() if any(_unit(h) in units for h in held))
        _refuse(body, f"{len(units)} that change something in Python", names.get(first))


def _refuse(body: StepBody, what: str, name: str | None) -> None:
    where = f"on {name!r}" if name else "on a tensor outside of the model"
    raise CaptureError(
        f"wanted hooks on gradients whose order is of no account for execution={body.plan.execution!r}, "
        f"which hands out gradients in another order than the step as written, got {what}, {where}; do so "
        "after the step, or use execution='eager'"
    )


def _places(tensor: Tensor) -> list[dict[int, Any]]:
    places = (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)  # noqa: SLF001 - torch's own
    return [place for place in places if place]


def _hooks_of(tensor: Tensor) -> Iterator[_Hook]:
    for place in _places(tensor):
        for key, given in place.items():
            file, _ = _code(given)
            own = given
            if file == _OF_SEVERAL:
                own = next((c for c in contents(given.__closure__ or ()) if callable(c)), given)
            if not is_machinery(_code(own)[0]):
                yield _Hook(id(tensor), place, key, given, own)


def _code(hook: Any) -> tuple[str, str]:
    code = getattr(hook, "__code__", None)
    return (code.co_filename, code.co_name) if isinstance(code, CodeType) else ("", "")


def _unit(hook: _Hook) -> int:
    """Of hooks that are called one after the other whatever the order of gradients."""
    return hook.tensor if hook.own is hook.given else id(hook.own)


def _changing(body: StepBody, batch: Any, hooks: list[_Hook]) -> set[CodeType | None]:
    """The code of those hooks that change something in Python when they are called."""
    found: set[CodeType | None] = set()
    looked: set[CodeType | None] = set()

    def watched(hook: _Hook) -> Callable[[Tensor], Any]:
        code = getattr(hook.own, "__code__", None)

        def call(gradient: Tensor) -> Any:
            if code in looked:
                return hook.given(gradient)
            before = Undo(hook.own, values=False)
            result = hook.given(gradient)
            if hook.own is hook.given:  # another one calls it with the last of its gradients only
                looked.add(code)
            if any(before.changes()):
                found.add(code)
                looked.add(code)
            return result

        return call

    owned = [hook.own for hook in hooks]
    with undone(body.model, body.loss_fn, body.optimizer, *owned), contextlib.ExitStack() as stack:
        for hook in hooks:
            hook.place[hook.key] = watched(hook)
            stack.callback(hook.place.__setitem__, hook.key, hook.given)
        _backward(body, batch)
    return found


def _backward(body: StepBody, batch: Any) -> None:
    """Gradients of a step as it was written; those of several workers, which are not sent, return."""
    given = pytree.tree_map_only(Tensor, own_copy, batch)
    with body.as_written():
        loss = scalar_loss(body.form(body.model, given))
    if body.synchronizer is None:
        loss.backward()
        return
    trained = [parameter for parameter in body.model.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss, trained, allow_unused=True)
