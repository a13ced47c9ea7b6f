"""Generators of Python's that a program owns (`random.Random(7)`), as programs see them.

Torch's compiler (2.11 to 2.13) takes the state that it finds for a constant: each call draws the numbers of
the first one and puts the same state back, without a word. In pieces that this package compiles, such calls
are left to Python; a program that is read in one piece has no place for them. What `random` itself draws the
compiler asks for in every call.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.misc import RandomClassVariable, RandomVariable

from ridgeline.programs.watches.marks import is_marked, mark

_make_as_in_torch: Any = RandomClassVariable.call_function
_call_as_in_torch: Any = RandomVariable.call_method


def leaves_draws_alone(backend: Callable[..., Any]) -> None:
    """Have what is compiled with a backend leave the calls of such generators to Python.

    Done again, it changes nothing. Programs of other backends are compiled as before.

    Args:
        backend: Of `torch.compile`.
    """
    mark(backend)
    RandomClassVariable.call_function = _make  # type: ignore[method-assign]
    RandomVariable.call_method = _call  # type: ignore[method-assign]


def _make(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of `random.Random(...)` in a program."""
    if is_marked(tx.output.compiler_fn):
        _refuse("random.Random()")
    return _make_as_in_torch(variable, tx, args, kwargs)


def _call(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the methods of `random.Random`."""
    if is_marked(tx.output.compiler_fn):
        _refuse(f"{name}() of a random.Random")
    return _call_as_in_torch(variable, tx, name, args, kwargs)


def _refuse(name: str) -> NoReturn:
    """Have the compiler leave the call to Python, or say why it cannot."""
    unimplemented(
        gb_type=(
            f"{name}, whose state is Python's, where a captured program does not look; draw outside and pass "
            "what it gives, or draw with torch"
        ),
        context=name,
        explanation="Each call would draw the same numbers.",
        hints=[],
    )
