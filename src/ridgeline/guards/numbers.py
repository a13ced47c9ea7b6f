"""Numbers that NumPy computes of constants (sizes, mostly), which a reading knows as a run does."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import NumpyVariable, get_np_to_tnp_map

_NUMBERS = (np.number, np.bool_)
_RANDOM = "torch._numpy.random"
_call: Any = NumpyVariable.call_function
_wrap: Any = VariableBuilder.wrap_literal
_create: Any = ConstantVariable.create
_is_literal: Any = ConstantVariable.is_base_literal


@contextlib.contextmanager
def numbers_known() -> Iterator[None]:
    """Inside, TorchDynamo takes `np.prod(x.shape)` for the number that it is.

    As it compiles it makes a tensor of it, by which no program may branch and which is no size.
    """
    with (
        mock.patch.object(NumpyVariable, "call_function", _call_function),
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


def _constant(value: Any, **kwargs: Any) -> Any:
    """What TorchDynamo computes of constants, of such numbers too."""
    is_number = isinstance(value, _NUMBERS)
    return NumpyNumber(value, **kwargs) if is_number else _create(value, **kwargs)


def _is_base_literal(value: Any) -> bool:
    return isinstance(value, _NUMBERS) or bool(_is_literal(value))


def _wrap_literal(builder: Any, value: Any) -> Any:
    # What a program is given may be another in the next call: it stays an array, as TorchDynamo has it.
    if isinstance(value, np.generic):
        return builder.wrap_numpy_ndarray(np.asarray(value))
    return _wrap(builder, value)


def _are_known(args: Any, kwargs: Any) -> bool:
    return all(value.is_python_constant() for value in (*args, *kwargs.values()))


def _result(call: Any, args: Any, kwargs: Any) -> Any:
    named = {key: value.as_python_constant() for key, value in kwargs.items()}
    return call(*(value.as_python_constant() for value in args), **named)
