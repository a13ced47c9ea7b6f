"""The guards of a callable that changes nothing in Python once it has filled its caches."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import Undo
from ridgeline.runtime.hybrid.guards.guards import Guards
from ridgeline.runtime.hybrid.guards.reading import Write
from ridgeline.runtime.hybrid.guards.spoken import spoken
from ridgeline.runtime.saved_state import preserved


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
    """The guards of `program(fn, args)`; a callable that writes is called once first, to fill its caches.

    Args:
        program: Calls `fn(*args)`.
        fn: The callable.
        args: Its arguments.
        name: What people call it.
        allows: Says of a write that a captured program makes it as well.

    Raises:
        UnreadableError: torch's compiler cannot read the call in one piece.
        CaptureError: the call changes something besides tensors; everything is as it was before.
    """

    def read() -> tuple[Guards, list[Write]]:
        guards = Guards(program, {"fn": fn, "args": args}, ["args"])
        return guards, [write for write in guards.writes if not allows(write)]

    guards, writes = read()
    if not writes:
        return guards
    before = Undo(fn, args)
    try:
        with preserved(tensors_of(fn)):
            fn(*args)
        guards, writes = read()
    except BaseException:
        before.restore()
        raise
    if writes:
        before.restore()
        listed = ", ".join(f"{spoken(w.what, fn, fn=name)} (a {w.kind})" for w in writes)
        raise CaptureError(
            f"wanted a callable that changes nothing but the values of tensors, got one that writes "
            f"{listed}, which a captured program would never do again; use mode='eager', or do it around the "
            "call"
        )
    return guards
