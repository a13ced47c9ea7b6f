"""What a call of a `Hybrid` goes through first: the guards of the captured programs, one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Holds = Callable[[dict[str, Any]], bool]


def call_program(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The program whose guards are compared; the names of its parameters are theirs.

    torch's compiler passes over what computes nothing, so this computes something.
    """
    return fn(*args), torch.zeros((), device="cpu")


def front_of(
    fn: Callable[..., Any],
    table: Sequence[tuple[Holds, Callable[..., Any]]],
    miss: Callable[..., Any],
) -> Callable[..., Any]:
    """A call that goes straight into the first program that fits, and to `miss` if none does.

    Programs run without gradients, and their guards are compared in that mode, as they were made.

    Args:
        fn: The callable as written.
        table: Guards of `call_program`, and what to call where they hold.
        miss: Takes the call otherwise.
    """
    is_enabled, enable = torch.is_grad_enabled, torch._C._set_grad_enabled  # noqa: SLF001 - a tenth of no_grad

    def call(*given: Any) -> Any:
        has_gradients = is_enabled()
        # By the names of `call_program`, which are those in the guards' expressions.
        arguments = {"fn": fn, "args": given}
        if has_gradients:
            enable(False)
        try:
            for holds, run in table:
                if holds(arguments):
                    return run(*given)
        finally:
            if has_gradients:
                enable(True)
        return miss(*given)

    return call
