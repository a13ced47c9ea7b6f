"""Functions that keep their results (`functools.cache`, `lru_cache`), as programs see them.

Torch's compiler looks through the cache and reads the function inside anew: what it finds is another value
than the one kept, wherever the function reads something that has changed since, or gives an object that
others may change. In pieces that this package compiles, such calls are left to Python, which keeps what it
kept; a program that is read in one piece has no place for them.
"""

import functools
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable

from ridgeline.programs.watches.marks import is_marked, mark
from ridgeline.reach.owners import is_users

_PURE = frozenset((
    "abs", "all", "any", "bool", "complex", "divmod", "enumerate", "float", "int", "len",
    "max", "min", "pow", "range", "reversed", "round", "str", "sum", "tuple", "zip",
))  # fmt: skip
"""Functions of Python that give the same for the same, and nothing that can be changed."""
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_as_in_torch: Any = WrapperUserFunctionVariable.call_function


def leaves_caches_alone(backend: Callable[..., Any]) -> None:
    """Have what is compiled with a backend leave calls of caches to Python, unless a cache changes nothing.

    The caches of libraries are read as torch reads them: what they keep is settled when a process starts.
    Done again, it changes nothing. Programs of other backends are compiled as before.

    Args:
        backend: Of `torch.compile`.
    """
    mark(backend)
    # For all of the process, since the compiler has no hook; what has no mark goes on to torch's own.
    WrapperUserFunctionVariable.call_function = _call_function  # type: ignore[method-assign]


def is_pure(function: Any) -> bool:
    """Whether it computes with its arguments, numbers and `math` alone, so that a cache changes no result.

    Args:
        function: What the cache is around.
    """
    # A closure can hold anything, and another thing in the next call.
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    if not _is_plain_value(
        (function.__defaults__ or (), *(function.__kwdefaults__ or {}).values())
    ):
        return False
    # Names of inner functions and comprehensions are not among those of the outer one.
    if any(isinstance(part, types.CodeType) for part in function.__code__.co_consts):
        return False
    return all(_is_pure_name(name, function.__globals__) for name in function.__code__.co_names)


def _is_pure_name(name: str, scope: dict[str, Any]) -> bool:
    # The module's own name hides that of Python: a user's `len` is none of `_PURE`.
    if name in scope:
        return scope[name] is math
    return name in _PURE or hasattr(math, name)


def _call_function(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the method of `WrapperUserFunctionVariable`."""
    wrapper = variable.wrapper_obj
    if not (_is_users_cache(wrapper) and is_marked(tx.output.compiler_fn)):
        return _as_in_torch(variable, tx, args, kwargs)
    given = (*variable.self_args(), *args, *kwargs.values())
    if not (is_pure(wrapper.__wrapped__) and all(map(_is_plain, given))):
        _refuse(_name_of(wrapper))
    with warnings.catch_warnings():  # torch warns of what was just ruled out
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru")
        result = _as_in_torch(variable, tx, args, kwargs)
    if not _is_plain(result):
        _refuse(_name_of(wrapper))
    return result


def _name_of(wrapper: Any) -> str:
    return getattr(wrapper.__wrapped__, "__qualname__", repr(wrapper.__wrapped__))


def _refuse(name: str) -> NoReturn:
    """Have the compiler leave the call to Python, or say why it cannot."""
    unimplemented(
        gb_type=(
            f"a call of {name}, which keeps its results in a cache of Python's, where a captured program "
            "does not look; call it outside and pass what it gives, or take the cache away"
        ),
        context=name,
        explanation="The cache may hold another value than the function would give now.",
        hints=[],
    )


def _is_users_cache(wrapper: Any) -> bool:
    if not isinstance(wrapper, functools._lru_cache_wrapper):  # noqa: SLF001 - the only name of the type
        return False
    code = getattr(wrapper.__wrapped__, "__code__", None)
    return code is None or is_users(code.co_filename)


def _is_plain(variable: VariableTracker) -> bool:
    """Whether the compiler knows it as a value that cannot change."""
    if not variable.is_python_constant():
        return False
    return _is_plain_value(variable.as_python_constant())


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain_value, value))
    return isinstance(value, _PLAIN)
