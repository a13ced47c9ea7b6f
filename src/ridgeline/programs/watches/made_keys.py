"""Keys that a program looks up: objects, and what it makes (a tuple with a module in it, a weak reference).

Torch's compiler compares a key that is a constant, or that it found somewhere. For others it guards nothing
(torch 2.11 to 2.13), so that an entry which is new, gone or elsewhere would not be seen, as in a
`WeakKeyDictionary`. Of an object that is looked for it compares the class, though another one of that class
may be a key, too. What methods of the user's say of keys, and what a class gives for `Kind[key]`, it takes
for constants.
"""

import dataclasses
import enum
import functools
import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import SetVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import MISSING, UNKNOWN, of_name, value_of
from ridgeline.programs.watches.identities import answer_identity, is_nan
from ridgeline.programs.watches.left_to_python import is_marked, refuse
from ridgeline.programs.watches.objects.arrays import answer_class, follow_attributes
from ridgeline.programs.watches.objects.values import answer_of, is_value
from ridgeline.reach.owners import is_users
from ridgeline.reach.reach import underlying

_KINDS: tuple[Any, ...] = (ConstDictVariable, SetVariable)
_COMPARED = (type, types.FunctionType, types.ModuleType, types.NoneType, enum.Enum)
"""What the compiler compares by identity."""
_call_in_torch: Any = BuiltinVariable.call_function
_contains: dict[Any, Any] = {kind: kind.__contains__ for kind in _KINDS}


def compare_made_keys() -> None:
    """Have the compiler of this process compare keys where a program looks for such; again, too."""
    # By `__contains__`, which is asked before each look-up; what has a guard gets no second one.
    for kind in _KINDS:
        kind.__contains__ = functools.partialmethod(_is_in, _contains[kind])
    BuiltinVariable.call_function = _subscribe  # type: ignore[method-assign]
    follow_attributes()


def _is_in(variable: Any, in_torch: Any, key: VariableTracker) -> bool:
    """In place of the method of dictionaries and sets."""
    output = InstructionTranslator.current_tx().output
    if is_marked(output.compiler_fn) and is_nan(_constant(key)):
        refuse(
            "nan",
            "nan looked up in a dictionary or set, where Python asks whether it is the same object; ask with "
            "math.isnan(...) before",
            "The compiler makes another object of it.",
        )
    if is_marked(output.compiler_fn):
        _refuse_own_equality(variable, key)
    # What the program has changed was compared when it did so.
    if variable.source is not None and not output.side_effects.is_modified(variable):
        if key.source is not None:
            if is_marked(output.compiler_fn):
                require = functools.partial(_require_key, variable.source)
                output.guards.add(Guard(key.source, require))
        elif not key.is_python_constant() and isinstance(variable, ConstDictVariable):
            variable.install_dict_keys_match_guard()
    return bool(in_torch(variable, key))


def _subscribe(variable: Any, tx: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """In place of the call of a function of Python's, `operator.getitem` among them."""
    is_ours = is_marked(tx.output.compiler_fn)
    if is_ours:
        answer = (
            answer_of(variable.fn, args)
            or answer_class(variable.fn, tx, args)
            or answer_identity(variable.fn, args)
        )
        if answer is not None:
            return answer
    if variable.fn is operator.getitem and is_ours:
        # Before torch tries: where one way is refused, it takes what the operator gives now for a constant.
        holder = args[0].realize()
        if isinstance(holder, _KINDS):
            _refuse_own_equality(holder, args[1])
        is_class = isinstance(holder, UserDefinedClassVariable)
        if is_class and _is_users_method(kind := holder.value, "__class_getitem__"):
            refuse(
                kind.__qualname__,
                f"{kind.__qualname__}[...], for which the class has a method of its own, where a captured "
                "program does not look; ask for it outside, and hold it in an attribute",
                "The compiler would take what it gives for a constant.",
            )
    return _call_in_torch(variable, tx, args, kwargs)


def _refuse_own_equality(holder: Any, key: Any) -> None:
    """Refuse a look-up where methods of the user's or in C say which keys are equal.

    Answers of the user's may change; to the compiler two dates are two keys.
    """
    # Those of a holder are wrapped.
    variables = [getattr(one, "vt", one) for one in (key.realize(), *holder.items)]
    kind = next(filter(None, map(_own_equality, variables)), None)
    if kind is not None:
        refuse(
            kind.__qualname__,
            f"a key of {kind.__qualname__} looked up, whose own methods say what it equals, where a captured "
            "program does not look; look it up outside and pass what is found, or use plain keys",
            "The answer may be another in each call.",
        )


def _own_equality(variable: Any) -> type | None:
    """The class of a key, where that has such methods."""
    # Without `isinstance`, which has the compiler look at what it need not have looked at yet.
    if not type.__instancecheck__(UserDefinedObjectVariable, variable):
        return None
    kind: type = variable.python_type()
    is_own = any(_is_users_method(kind, name) for name in ("__eq__", "__hash__"))
    return kind if is_own or is_value(variable.value) else None


def _is_users_method(kind: type, name: str) -> bool:
    code = getattr(underlying(inspect.getattr_static(kind, name, None)), "__code__", None)
    # Of a data class Python makes them of its fields, which are compared.
    is_made = dataclasses.is_dataclass(kind) and getattr(code, "co_filename", "") == "<string>"
    return code is not None and not is_made and is_users(code.co_filename)


def _constant(key: VariableTracker) -> Any:
    return key.as_python_constant() if key.is_python_constant() else None


def _require_key(source: Any, builder: Any, guard: Guard) -> None:
    """A `Guard` on an object that is looked for: none of the keys, or the one that it was."""
    of_keys = Guard(source, functools.partial(_require_key, source))
    key, keys = value_of(builder, guard), value_of(builder, of_keys)
    if not (_is_one_of_many(key) and isinstance(keys, (dict, set, frozenset))):
        return
    find, find_keys = of_name(builder, guard.name), of_name(builder, of_keys.name)
    place = _place(key, keys)

    def is_same(now: Any) -> bool:
        try:
            return _place(find(now), find_keys(now)) == place
        except MISSING:  # what is compared of the way to it is compared later
            return False

    what = f"whether {guard.name} is in {of_keys.name} changed"
    builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def _is_one_of_many(key: Any) -> bool:
    """Whether a key is an object that equals itself only, and the compiler takes another one for the same."""
    if key is UNKNOWN or isinstance(key, _COMPARED):
        return False
    return isinstance(key, torch.Tensor) or type(key).__eq__ is object.__eq__


def _place(key: Any, keys: Any) -> int | None:
    # The key of a dictionary lives as long as that, so that no other object gets its number.
    return id(key) if key in keys else None
