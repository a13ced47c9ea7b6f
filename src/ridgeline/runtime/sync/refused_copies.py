"""Copies of an optimizer that does not remember what it would: they begin anew, and nobody would be told.

`copy.deepcopy(optimizer)` and `torch.save(optimizer)` take its state past the hooks of `state_dict()`.
"""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

_TAKER = "__getstate__"


def refuse_copies(optimizer: Optimizer, check: Callable[[Optimizer], object]) -> None:
    """Have `check` called, which may refuse, before an optimizer is copied or written as a whole."""

    def taken() -> Any:
        check(optimizer)
        return type(optimizer).__getstate__(optimizer)

    # On the object, where copy and pickle look first; a class of its own would be another optimizer.
    vars(optimizer)[_TAKER] = taken


def allow_copies(optimizer: Optimizer) -> None:
    """Its state is its own again."""
    vars(optimizer).pop(_TAKER, None)
