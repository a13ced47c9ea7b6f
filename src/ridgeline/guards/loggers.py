"""Loggers in a program that is read: what they are told is left out, and what they answer is compared.

Warnings are left out, too, whatever their category.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.misc import DebuggingVariable, LoggingLoggerVariable

_ASKED = frozenset({"isEnabledFor", "getEffectiveLevel", "hasHandlers"})
_MAKING = frozenset({"getChild", "makeRecord", "findCaller"})
_call: Any = LoggingLoggerVariable.call_method


class Unordered(set[Any]):
    """Members that are not searched: torch 2.11 sorts its settings to record them, functions too."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def told() -> set[Any]:
    """The methods of loggers that answer nothing, with those that libraries add."""
    own = vars(logging.Logger).items()
    return Unordered(f for name, f in own if callable(f) and name not in _ASKED | _MAKING)


@contextlib.contextmanager
def asking(asked: dict[Any, Callable[[], Any]]) -> Iterator[None]:
    """Inside, TorchDynamo takes what loggers answer for constants; `asked` receives what asks for them.

    A call that its settings let it move, as that of a warning, is left out: it moves none that is given a
    class.
    """

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name not in _ASKED or kwargs or not all(a.is_python_constant() for a in args):
            return _call(self, tx, name, args, kwargs)
        given = [a.as_python_constant() for a in args]
        ask = functools.partial(getattr(self.value, name), *given)
        asked[self.value, name, *given] = ask
        return ConstantVariable.create(ask())

    with (
        mock.patch.object(LoggingLoggerVariable, "call_method", call_method),
        mock.patch.object(DebuggingVariable, "call_function", _nothing),
    ):
        yield


def _nothing(*_: Any) -> Any:
    return ConstantVariable.create(None)
