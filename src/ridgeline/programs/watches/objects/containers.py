"""Containers that torch's compiler (2.11 to 2.13) reads otherwise than Python, or takes for granted in part.

A deque with a limit (`collections.deque(maxlen=10)`: a window over steps) is one without to it, so that what
a program appends is there beside what should have been dropped. Lists in a tuple it makes anew where code
takes one, so that none is another one of the program. And where code goes through the keys of a dictionary,
it may compare them in no order, or (`[*table]`) not at all; nor where it takes the whole for a constant, as
when code asks whether an `OrderedDict` is empty.
"""

import collections
from typing import Any
from unittest import mock

from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import CommonListMethodsVariable, DequeVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import compare_by_name, value_of
from ridgeline.programs.watches.left_to_python import is_marked, is_plain_value

_wrap_in_torch: Any = VariableBuilder.wrap_listlike
_match_in_torch: Any = ConstDictVariable.install_dict_keys_match_guard
_call_in_torch: Any = CommonListMethodsVariable.call_method
_constant_in_torch: Any = ConstDictVariable.as_python_constant


def read_containers() -> None:
    """Have the compiler of this process read them as Python does; again, too."""
    VariableBuilder.wrap_listlike = _wrap  # type: ignore[method-assign]
    ConstDictVariable.install_dict_keys_match_guard = _match  # type: ignore[method-assign]
    CommonListMethodsVariable.call_method = _call  # type: ignore[method-assign]
    ConstDictVariable.as_python_constant = _constant  # type: ignore[method-assign]


def require_limit(builder: Any, guard: Guard) -> None:
    """A `Guard` on the most elements of a deque, where another one may take its place."""
    value = value_of(builder, guard)
    if isinstance(value, collections.deque):
        compare_by_name(builder, guard.name, lambda now: now.maxlen, "the limit of ")


def _wrap(builder: Any, value: Any) -> Any:
    """In place of the method of `VariableBuilder`."""
    if type(value) is tuple and not is_plain_value(value):
        # What is in it gets names of its own, as in a list.
        with mock.patch.object(ConstantVariable, "is_literal", return_value=False):
            return _wrap_in_torch(builder, value)
    result = _wrap_in_torch(builder, value)
    if isinstance(result, DequeVariable) and isinstance(value, collections.deque):
        result.maxlen = ConstantVariable.create(value.maxlen)
    return result


def _match(variable: Any) -> None:
    """In place of torch's: the guard on the keys of a dictionary."""
    _match_in_torch(variable)
    output = InstructionTranslator.current_tx().output
    if variable.source is not None and is_marked(output.compiler_fn):
        output.guard_on_key_order.add(variable.source)


def _constant(variable: Any) -> Any:
    """In place of torch's: what a dictionary of constants is."""
    variable.install_dict_keys_match_guard()
    return _constant_in_torch(variable)


def _call(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """In place of the methods of lists and deques."""
    if name == "extend" and len(args) == 1 and isinstance(args[0].realize(), ConstDictVariable):
        args[0].realize().install_dict_keys_match_guard()
    return _call_in_torch(variable, tx, name, args, kwargs)
