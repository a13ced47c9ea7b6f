"""Numbers that NumPy gives, as `np.sum(a)` does, which torch's compiler (2.11 to 2.13) has for arrays.

Code that asks for their class, or with `hasattr`, is run by Python from the beginning, since behind a break
they would be arrays.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch._dynamo import exc
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import UNKNOWN, compare, resolved, value_of
from ridgeline.programs.watches.left_to_python import is_marked, refuse

_ASKED = (type, isinstance, hasattr)
_has_in_torch: Any = NumpyNdarrayVariable.call_obj_hasattr


def follow_attributes() -> None:
    """Have the compiler of this process ask numbers for their attributes, and not arrays; again, too."""
    NumpyNdarrayVariable.call_obj_hasattr = _has  # type: ignore[method-assign]


def _has(variable: Any, tx: Any, name: str) -> Any:
    """In place of the method of arrays."""
    is_ours = is_marked(tx.output.compiler_fn)
    asked = (variable, ConstantVariable.create(name))
    answer = answer_class(hasattr, tx, asked) if is_ours else None
    return _has_in_torch(variable, tx, name) if answer is None else answer


def answer_class(function: Any, tx: Any, args: Sequence[Any]) -> Any:
    """What is said of the class of a number of NumPy's; None where code asks for something else.

    Raises:
        SkipFrame: it is not known whether it is a number or an array; not of programs that are read whole.
    """
    one: Any = args[0].realize() if args and function in _ASKED else None
    if not isinstance(one, NumpyNdarrayVariable) or one.as_proxy().node.meta["example_value"].ndim:
        return None
    if function is hasattr and _is_of_both(args[1]):
        return None
    source: Any = one.source
    number = UNKNOWN if source is None else resolved(tx.output, source)
    if isinstance(number, np.generic) and (function is not type or tx.one_graph):
        if function is type or not args[1].is_python_constant():
            return None
        tx.output.guards.add(Guard(source, _require_class))
        return ConstantVariable.create(function(number, args[1].as_python_constant()))
    if isinstance(number, np.ndarray):
        return None
    if tx.one_graph:
        refuse(
            "a number of NumPy's",
            f"{function.__name__}(...) of what NumPy computes, a number or an array, which a captured "
            "program does not tell apart; ask outside",
            "The compiler takes each for an array.",
        )
    raise exc.SkipFrame("it asks for the class of what NumPy computes")


def _is_of_both(name: Any) -> bool:
    """Whether arrays have an attribute as numbers do."""
    wanted = name.as_python_constant() if name.is_python_constant() else ""
    return hasattr(np.ndarray, wanted) and hasattr(np.generic, wanted)


def _require_class(builder: Any, guard: Guard) -> None:
    """A `Guard` on the class of a number."""
    manager = builder.get_guard_manager(guard)
    compare(manager, type, value_of(builder, guard), f"the class of {guard.name}")
