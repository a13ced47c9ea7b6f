"""The guards of a callable that changes nothing in Python, or no longer once it has filled its caches."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.guards.guards import Guards
from ridgeline.guards.reading import Write
from ridgeline.guards.spoken import spoken
from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import undone
from ridgeline.state.saved_state import preserved


class WritingError(CaptureError):
    """A call that changes something besides the values of tensors; perhaps the first one only."""


def tensors_of(fn: Callable[..., Any]) -> list[Tensor]:
    """The tensors that a callable can get at."""
    return [tensor for tensor in Reach(fn).tensors if tensor.layout == torch.strided]


def settled_guards(
    program: types.FunctionType,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    name: str,
    *,
    allows: Callable[[Write], bool] = lambda _: False,
) -> Guards:
    """The guards of `program(fn, args)`, which is read only.

    `allows` says of a write that a captured program makes it as well, `name` what people call the callable.

    Raises:
        UnreadableError: torch's compiler cannot read the call in one piece.
        WritingError: this call changes something besides tensors; one after it may not.
    """
    guards = Guards(program, {"fn": fn, "args": args}, ["args"])
    writes = [write for write in guards.writes if not allows(write)]
    if writes:
        listed = ", ".join(f"{spoken(w.what, fn, fn=name)} (a {w.kind})" for w in writes)
        raise WritingError(
            f"wanted a callable that changes nothing but the values of tensors, got one that writes "
            f"{listed}, which a captured program would never do again; use mode='eager', do it around the "
            "call, or, where only a first call does it, make that before"
        )
    return guards


@contextlib.contextmanager
def filled(fn: Callable[..., Any], args: tuple[Any, ...]) -> Iterator[None]:
    """A callable with caches as a call leaves them; afterwards everything is as it was.

    The call that fills them for good is one of the user's: it may look at the values of its arguments.
    """
    with undone(fn, args):
        # Tensors as before the call: filling a cache is wanted, a step of batch statistics is not.
        with preserved(tensors_of(fn)):
            fn(*args)
        yield
