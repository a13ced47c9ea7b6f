"""Values of Python's library that say in C what they equal: dates, a `Decimal`, what a `bytearray` holds.

Torch's compiler (2.11 to 2.13) asks them as it reads a program, whether they are true, equal or less, and
takes the answer for a constant: it compares their class alone.
"""

import array
import datetime
import decimal
import operator
import re
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import compare, compare_by_name, value_of
from ridgeline.programs.watches.left_to_python import is_marked, refuse
from ridgeline.reach.owners import is_users_class

_BUFFERS = (array.array, bytearray, memoryview)
_VALUES = (
    *(datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(decimal.Decimal, re.Pattern, *_BUFFERS),
)
_PLAIN: tuple[Any, ...] = (int, float, complex, str, bytes)
"""Where a user's class inherits one of these it says what that says."""
_ASKED = (float, int, operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_INNER = ("_dict_vt", "_list_vt", "_set_vt", "_tuple_vt")
"""Where a version of torch (2.11) keeps the container that an object inherits."""
_getattr_in_torch: Any = UserDefinedObjectVariable.var_getattr


def is_value(value: Any) -> bool:
    """Whether an object is one of these, or of a class that inherits it and its comparison."""
    is_one = isinstance(value, _VALUES) or (
        isinstance(value, _PLAIN) and is_users_class(type(value)) and not isinstance(value, Enum)
    )
    return is_one and isinstance(type(value).__eq__, types.WrapperDescriptorType)


def require_value(builder: Any, guard: Guard) -> None:
    """A `Guard` on what such an object holds."""
    value = value_of(builder, guard)
    if is_value(value):
        manager = builder.get_guard_manager(guard)
        compare(manager, _content_of, value, f"the value of {guard.name}")


def _content_of(value: Any) -> Any:
    """The class, and what it is made of."""
    kind = type(value)
    for plain in _PLAIN:
        if isinstance(value, plain):
            return kind, plain.__repr__(value)  # of nan, too, which does not equal itself
    if isinstance(value, _BUFFERS):
        with memoryview(value) as view:
            return kind, view.format, view.tobytes()
    if isinstance(value, re.Pattern):
        return kind, value.pattern, value.flags
    return kind, *value.__reduce_ex__(2)[:2]


def answer_of(function: Any, args: Sequence[Any]) -> Any:
    """What a comparison, `float` or `int` gives for such an object; None where that is for torch to say.

    Torch takes two that are equal for two objects (2.11), and calls itself without end (2.13).
    """
    if function not in _ASKED:
        return None
    parts = [part.realize() for part in args]
    if not any(map(_is_held, parts)):
        return None
    if not all(_is_held(part) or part.is_python_constant() for part in parts):
        refuse(
            "a value of Python's library",
            "a comparison with a value of Python's library in C (a date, a Decimal), whose other side is "
            "none; compare outside, and hold the answer in an attribute",
            "The compiler would compare objects.",
        )
    values = [part.value if _is_held(part) else part.as_python_constant() for part in parts]
    try:
        return ConstantVariable.create(function(*values))
    except (TypeError, ValueError, ArithmeticError):  # for torch to raise
        return None


def answer_truth() -> None:
    """Have the compiler of this process ask objects whether they are true.

    Those whose class says it in C, of a subclass of `list` as well, torch 2.11 takes for true.
    """
    UserDefinedObjectVariable.var_getattr = _getattr  # type: ignore[method-assign]


class _Truth(UserMethodVariable):
    """The method that says whether an object is true."""

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        """A constant, which is compared from then on."""
        one: Any = self.obj
        if one.source is not None:
            tx.output.guards.add(Guard(one.source, _require_truth))
        inner = _inner(one)
        return ConstantVariable.create(bool(one.value if inner is None else inner.items))


def _getattr(variable: Any, tx: Any, name: str) -> Any:
    """In place of the attribute of an object."""
    if name == "__bool__" and is_marked(tx.output.compiler_fn):
        kind = type(variable.value)
        method = getattr(kind, "__bool__", None) or getattr(kind, "__len__", None)
        is_known = variable.source is not None or _inner(variable) is not None
        if is_known and isinstance(method, types.WrapperDescriptorType):
            return _Truth(_getattr, variable)
    return _getattr_in_torch(variable, tx, name)


def _inner(variable: Any) -> Any:
    """The container that an object inherits, with what the program itself has put in or taken out."""
    return next((found for name in _INNER if (found := vars(variable).get(name))), None)


def _require_truth(builder: Any, guard: Guard) -> None:
    """A `Guard` on whether an object is true."""
    compare_by_name(builder, guard.name, bool, "the truth of ")


def _is_held(variable: Any) -> bool:
    """Whether it is such an object of the program's, which is compared before each call."""
    is_object = isinstance(variable, UserDefinedObjectVariable) and variable.source is not None
    return is_object and is_value(variable.value)
