"""What programs leave to Python of their code: caches, own generators, assertions, what classes decide.

Torch's compiler reads all of these otherwise than Python runs them. In pieces that this package compiles they
are left to Python; a program that is read in one piece has no place for them.

- Functions that keep their results (`functools.cache`, `lru_cache`): it looks through the cache and reads
  the function inside anew. What it finds is another value than the one kept, wherever the function reads
  something that has changed since, or gives an object that others may change.
- Generators of Python's that a program owns (`random.Random(7)`): it (2.11 to 2.13) takes the state that it
  finds for a constant, so that each call draws the numbers of the first one and puts the same state back,
  without a word. What `random` itself draws it asks for in every call.
- Assertions about the values of tensors (`assert (x > 0).all(), "..."`): it (2.11 to 2.13) makes an operator
  of one. That raises another error than Python does, and on a GPU it takes the device along: no later step
  of the process runs. Operators that assert without words (`torch._assert_async(x)`) it leaves out.
- Classes whose metaclass has a `__call__`, as where a class has one object only: it makes an object of the
  class, whatever that would give.
- Whether a package is installed: a constant to it. What libraries ask is settled when a process starts.
"""

import functools
import importlib.metadata
import importlib.util
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch._dynamo import symbolic_convert
from torch._dynamo.exc import unimplemented
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import SkipFunctionVariable, WrapperUserFunctionVariable
from torch._dynamo.variables.misc import RandomClassVariable, RandomVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable

from ridgeline.reach.owners import is_standard, is_users

_MARK = "_ridgeline_leaves_to_python"
_INNER = ("compiler_fn", "__wrapped__")
"""Where what torch puts around a backend holds it."""
_PURE = frozenset((
    "abs", "all", "any", "bool", "complex", "divmod", "enumerate", "float", "int", "len",
    "max", "min", "pow", "range", "reversed", "round", "str", "sum", "tuple", "zip",
))  # fmt: skip
"""Functions of Python that give the same for the same, and nothing that can be changed."""
_PLAIN = (bool, int, float, complex, str, bytes, types.NoneType)
_call_cache: Any = WrapperUserFunctionVariable.call_function
_make_generator: Any = RandomClassVariable.call_function
_call_generator: Any = RandomVariable.call_method
_make_object: Any = UserDefinedClassVariable.call_function
_call_skipped: Any = SkipFunctionVariable.call_function
_ASSERTIONS = (torch._assert_async, torch._functional_assert_async)  # noqa: SLF001
_OF_PACKAGES = (importlib.util.find_spec, importlib.metadata.version)
_find_assertion: Any = symbolic_convert._detect_and_normalize_assert_statement  # noqa: SLF001 - says what is one


def leave_to_python(backend: Callable[..., Any]) -> None:
    """Have what a backend of `torch.compile` compiles leave these to Python, but caches that change nothing.

    The caches of libraries are read as torch reads them: what they keep is settled when a process starts.
    Done again, it changes nothing. Programs of other backends are compiled as before.
    """
    setattr(backend, _MARK, True)
    # For all of the process, since the compiler has no hook; what has no mark goes on to torch's own.
    WrapperUserFunctionVariable.call_function = _call  # type: ignore[method-assign]
    RandomClassVariable.call_function = _make  # type: ignore[method-assign]
    RandomVariable.call_method = _draw  # type: ignore[method-assign]
    UserDefinedClassVariable.call_function = _make_of_class  # type: ignore[method-assign]
    SkipFunctionVariable.call_function = _ask_for_package  # type: ignore[method-assign]
    symbolic_convert._detect_and_normalize_assert_statement = _detect  # type: ignore[assignment]  # noqa: SLF001


def is_marked(backend: Any) -> bool:
    """Whether a backend is one of this package's, inside whatever torch puts around."""
    if backend is None or getattr(backend, _MARK, False):
        return backend is not None
    return any(is_marked(getattr(backend, name, None)) for name in _INNER)


def is_pure(function: Any) -> bool:
    """Whether a function computes with its arguments, numbers and `math` alone: a cache changes no result."""
    # A closure can hold anything, and another thing in the next call.
    if not isinstance(function, types.FunctionType) or function.__closure__:
        return False
    if not is_plain_value((function.__defaults__ or (), *(function.__kwdefaults__ or {}).values())):
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


def _call(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the method of `WrapperUserFunctionVariable`."""
    wrapper = variable.wrapper_obj
    if not (_is_users_cache(wrapper) and is_marked(tx.output.compiler_fn)):
        return _call_cache(variable, tx, args, kwargs)
    given = (*variable.self_args(), *args, *kwargs.values())
    if not (is_pure(wrapper.__wrapped__) and all(map(_is_plain, given))):
        _refuse_cache(wrapper)
    with warnings.catch_warnings():  # torch warns of what was just ruled out
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru")
        result = _call_cache(variable, tx, args, kwargs)
    if not _is_plain(result):
        _refuse_cache(wrapper)
    return result


def _make(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of `random.Random(...)` in a program."""
    if is_marked(tx.output.compiler_fn):
        _refuse_draws("random.Random()")
    return _make_generator(variable, tx, args, kwargs)


def _draw(variable: Any, tx: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the methods of `random.Random`."""
    if is_marked(tx.output.compiler_fn):
        _refuse_draws(f"{name}() of a random.Random")
    return _call_generator(variable, tx, name, args, kwargs)


def _make_of_class(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the call of a class."""
    if is_marked(tx.output.compiler_fn) and _decides_calls(type(variable.value)):
        name = variable.value.__qualname__
        refuse(
            name,
            f"a call of {name}, whose metaclass decides what that gives, where a captured program does not "
            "look; make the object outside, and hold it in an attribute",
            "The compiler would make an object of the class.",
        )
    return _make_object(variable, tx, args, kwargs)


def _ask_for_package(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the call of a function that the compiler does not read."""
    is_asked = any(variable.value is one for one in _OF_PACKAGES)
    if is_asked and is_users(tx.f_code.co_filename) and is_marked(tx.output.compiler_fn):
        name = f"{variable.value.__module__}.{variable.value.__name__}"
        refuse(
            name,
            f"{name}(...) in each call, though packages may be installed later; ask once, outside, and hold "
            "the answer in an attribute",
            "The compiler would take the answer for a constant.",
        )
    return _call_skipped(variable, tx, args, kwargs)


def _detect(translator: Any, *args: Any) -> bool:
    """In place of torch's: whether what follows is an assertion that the compiler may put into operators."""
    is_ours = is_marked(translator.output.compiler_fn)
    return not is_ours and bool(_find_assertion(translator, *args))


def leave_assertion(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Leave the call of a function of torch to Python where that asserts something about values."""
    asked = next(iter((*args, *kwargs.values())), None)
    if not (is_marked(tx.output.compiler_fn) and any(variable.value is one for one in _ASSERTIONS)):
        return
    if asked is not None and asked.is_tensor():
        name = f"torch.{variable.value.__name__}"
        refuse(
            name,
            f"{name}(...) of the values of a tensor, which a captured program would leave out; return those "
            "from the step, and look at them behind it",
            "The compiler leaves assertions out.",
        )


def _refuse_cache(wrapper: Any) -> NoReturn:
    name = getattr(wrapper.__wrapped__, "__qualname__", repr(wrapper.__wrapped__))
    refuse(
        name,
        f"a call of {name}, which keeps its results in a cache of Python's, where a captured program "
        "does not look; call it outside and pass what it gives, or take the cache away",
        "The cache may hold another value than the function would give now.",
    )


def _refuse_draws(name: str) -> NoReturn:
    refuse(
        name,
        f"{name}, whose state is Python's, where a captured program does not look; draw outside and pass "
        "what it gives, or draw with torch",
        "Each call would draw the same numbers.",
    )


def refuse(name: str, what: str, why: str) -> NoReturn:
    """Have the compiler leave a call to Python, or say why it cannot."""
    unimplemented(gb_type=what, context=name, explanation=why, hints=[])


def _decides_calls(metaclass: type) -> bool:
    """Whether a metaclass, but for those of Python and torch, has code of its own for calls of classes."""
    code = getattr(metaclass.__call__, "__code__", None)
    return code is not None and not (
        is_standard(code.co_filename) or code.co_filename.startswith(torch.__path__[0])
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
    return is_plain_value(variable.as_python_constant())


def is_plain_value(value: Any) -> bool:
    """Whether a value cannot change and is compared by what it is: a number, text, None, tuples of those."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain_value, value))
    return isinstance(value, _PLAIN)
