"""Numbers of NumPy's: those that it computes of constants (sizes, mostly), and those that a program is given.

A reading knows both as a run does.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import BuiltinVariable, ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import NumpyVariable, get_np_to_tnp_map
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import compare

_NUMBERS = (np.number, np.bool_)
_PLAIN = (bool, int, float, str)
_RANDOM = "torch._numpy.random"
_call: Any = NumpyVariable.call_function
_wrap: Any = VariableBuilder.wrap_literal
_create: Any = ConstantVariable.create
_is_literal: Any = ConstantVariable.is_base_literal


@contextlib.contextmanager
def numbers_known() -> Iterator[None]:
    """Inside, TorchDynamo takes `np.prod(x.shape)`, or an attribute `np.bool_(True)`, for what it is.

    As it compiles it makes a tensor of it, by which no program may branch and which is no size.
    """
    # As it is now and not as torch has it: what a program leaves to Python is told there.
    before: Any = BuiltinVariable.call_function

    def call_builtin(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        known = _known_of_given(self, args, kwargs)
        return before(self, tx, args, kwargs) if known is None else known

    with (
        mock.patch.object(NumpyVariable, "call_function", _call_function),
        mock.patch.object(BuiltinVariable, "call_function", call_builtin),
        mock.patch.object(ConstantVariable, "create", staticmethod(_constant)),
        mock.patch.object(ConstantVariable, "is_base_literal", staticmethod(_is_base_literal)),
        mock.patch.object(VariableBuilder, "wrap_literal", _wrap_literal),
    ):
        yield


class NumpyNumber(ConstantVariable):
    """A constant that has the type of NumPy's, and its methods."""

    def __init__(self, value: Any, **kwargs: Any) -> None:
        super().__init__(value.item(), **kwargs)
        self.value = value

    def as_proxy(self) -> Any:
        """What is written in a graph."""
        return self.value.item()

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of `item()`, `astype(int)` and the like."""
        if _are_known(args, kwargs):
            return ConstantVariable.create(_result(getattr(self.value, name), args, kwargs))
        return super().call_method(tx, name, args, kwargs)


class GivenNumber(NumpyNdarrayVariable):
    """A number that a program is given: a tensor to operators, and a constant to all else that Python does.

    It may be another in the next call; the compiler has no guard for each type.
    """

    def __init__(self, *args: Any, number: Any = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.number = number

    def is_python_constant(self) -> bool:
        """Whether it is known."""
        return True

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The result of `item()`, `astype(int)` and the like."""
        method = (
            getattr(self.as_python_constant(), name, None) if _are_known(args, kwargs) else None
        )
        known = _known(method, args, kwargs)
        return super().call_method(tx, name, args, kwargs) if known is None else known

    def python_type(self) -> type:
        """The class of the number."""
        return type(self.as_python_constant())

    def as_python_constant(self) -> Any:
        """The number, which is compared from then on."""
        if self.source is not None:
            guards = InstructionTranslator.current_tx().output.guards
            guards.add(Guard(self.source, _require_number))
        return self.number


def _require_number(builder: Any, guard: Guard) -> None:
    """A `Guard` on type and value of a number."""
    what = guard.name if isinstance(guard.name, str) else str(guard.name)
    compare(builder.get_guard_manager(guard), _content_of, builder.get(guard), what)


def _content_of(number: Any) -> Any:
    return type(number), number.tobytes() if isinstance(number, np.generic) else number


def _call_function(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    # Those of which torch has a form of its own, so that none reads or writes files.
    form = get_np_to_tnp_map().get(function.value)
    if form is not None and form.__module__ != _RANDOM and _are_known(args, kwargs):
        # What it refuses, and what it warns of, is left to torch's form.
        with contextlib.suppress(ArithmeticError, TypeError, ValueError), np.errstate(all="raise"):
            result = _result(function.value, args, kwargs)
            if isinstance(result, _NUMBERS):
                return NumpyNumber(result)
    return _call(function, tx, args, kwargs)


def _known_of_given(function: Any, args: Any, kwargs: Any) -> Any:
    """What a function of Python's gives for numbers alone, a given one among them."""
    is_given = any(isinstance(value, GivenNumber) for value in args)
    is_known = is_given and _are_known(args, kwargs) and function.can_constant_fold_through()
    return _known(function.fn, args, kwargs) if is_known else None


def _known(call: Any, args: Any, kwargs: Any) -> Any:
    """What a call gives if that is a number or text, else None; what warns or raises is left to torch."""
    with contextlib.suppress(ArithmeticError, TypeError, ValueError), np.errstate(all="raise"):
        result = _result(call, args, kwargs)
        if isinstance(result, (*_NUMBERS, *_PLAIN)):
            return ConstantVariable.create(result)
    return None


def _constant(value: Any, **kwargs: Any) -> Any:
    """What TorchDynamo computes of constants, of such numbers too."""
    is_number = isinstance(value, _NUMBERS)
    return NumpyNumber(value, **kwargs) if is_number else _create(value, **kwargs)


def _is_base_literal(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or bool(_is_literal(value))


def _wrap_literal(builder: Any, value: Any) -> Any:
    if isinstance(value, np.generic):
        array = builder.wrap_numpy_ndarray(np.asarray(value))
        return GivenNumber(**vars(array), number=value)
    return _wrap(builder, value)


def _are_known(args: Any, kwargs: Any) -> bool:
    return all(value.is_python_constant() for value in (*args, *kwargs.values()))


def _result(call: Any, args: Any, kwargs: Any) -> Any:
    named = {key: value.as_python_constant() for key, value in kwargs.items()}
    return call(*(value.as_python_constant() for value in args), **named)
