"""Whether the classes of a program are what they were.

The compiler compares the class of an object, and takes for granted what is in most of them.
"""

import operator
import re
import types
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module

from ridgeline.programs.watches.conditions import Conditions
from ridgeline.programs.watches.hooks_of_all import STORES
from ridgeline.programs.watches.instances import classes_in_cells
from ridgeline.reach.owners import is_users_class
from ridgeline.reach.reach import underlying
from ridgeline.reach.replaced_code import replacements

_CAN_BE_CHANGED = 1 << 9
"""Of `type.__flags__`: made while Python runs, so that code may assign to it; `Py_TPFLAGS_HEAPTYPE`. Others
have names that their metaclass hides, such as `__annotations__` of functions."""
_CLASS_VARIABLE = re.compile(r"\.__dict__\)\['(\w+)'\]")
_ANNOTATIONS = "__annotations__"
"""What a class gets as soon as anybody asks for it."""
CALLS_OF_MODULES = ("__call__", "_call_impl")
"""What leads to a module's `forward`."""
_KINDS = (int, float, str, list, dict, set, memoryview, types.GeneratorType, types.CoroutineType)
_MORE = (
    "__bool__", "__bytes__", "__call__", "__ceil__", "__complex__", "__delete__", "__enter__", "__exit__",
    "__floor__", "__fspath__", "__get__", "__getattr__", "__imatmul__", "__instancecheck__", "__iter__",
    "__length_hint__", "__matmul__", "__missing__", "__rmatmul__", "__round__", "__set__",
    "__subclasscheck__", "__torch_function__",
)  # fmt: skip
_SPECIAL = frozenset(
    name
    for kind in _KINDS
    for name in dir(kind)
    if name.startswith("__") and name not in dir(object)
).union(
    _MORE,
    # Of what every object has, those that decide what an operator or a function of Python gives.
    ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__str__", "__repr__"),
    ("__format__", "__getattribute__", "__dir__", "__sizeof__"),
)
"""Methods that Python does without: a class that gets one later answers otherwise."""
_IS_LOOKED_UP = (types.FunctionType, property, staticmethod, classmethod)
"""What a class gives as it is, or binds anew each time; another descriptor runs code of its own then."""


def class_variables(expressions: Iterable[str]) -> frozenset[str]:
    """Names that the compiler has looked up in classes, from its expressions."""
    return frozenset(name for text in expressions for name in _CLASS_VARIABLE.findall(text))


def classes_of(objects: Iterable[Any]) -> tuple[type, ...]:
    """Of objects, and those of the user's that are among them or in closures of functions, with their own."""
    found: dict[type, None] = {}
    for value in objects:
        found[type(value)] = None
        for kind in (value, *classes_in_cells(value)):
            # What classes of libraries hold is settled, but for settings that are compared elsewhere.
            if isinstance(kind, type) and is_users_class(kind):
                found.update({kind: None, type(kind): None})
    return tuple(found)


def require_classes(
    conditions: Conditions,
    classes: Iterable[type],
    code: frozenset[types.CodeType],
    names: frozenset[str],
) -> None:
    """Require methods and variables of classes, and hooks of all modules, to stay as they are.

    Args:
        conditions: Receives the comparisons.
        classes: Looked at with what they inherit.
        code: Of the functions that were read; which of the methods count.
        names: Of further variables that count.
    """
    functions: dict[types.FunctionType, None] = {}
    for kind in classes:
        if not kind.__flags__ & _CAN_BE_CHANGED:
            continue
        owner = conditions.constant(kind)
        for base in filter(is_users_class, kind.__mro__):
            free = conditions.constant(_SPECIAL - vars(base).keys())
            own = conditions.constant(vars(base))
            conditions.require(f"{free}.isdisjoint({own})")
            # What is new may hide what is inherited, or be what code looks for in vain.
            count = len(vars(base).keys() - {_ANNOTATIONS})
            conditions.require(f"len({own}) - ({_ANNOTATIONS!r} in {own}) == {count}")
        if is_users_class(kind):  # another where it was given other bases
            conditions.require(f"{owner}.__mro__ is {conditions.constant(kind.__mro__)}")
        if issubclass(kind, nn.Module):  # the compiler calls `forward`, whatever these do
            for name in CALLS_OF_MODULES:
                called = conditions.constant(getattr(kind, name))
                conditions.require(f"{owner}.{name} is {called}")
        # As `inspect.getattr_static` has them, which for each name takes a tenth of a reading of a program.
        found = {
            name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()
        }
        for name, value in sorted(found.items(), key=operator.itemgetter(0)):
            function = underlying(value)
            has_been_read = isinstance(function, types.FunctionType) and function.__code__ in code
            if not (has_been_read or name in names):
                continue
            if has_been_read:
                functions[function] = None
            if hasattr(type(value), "__get__") and not isinstance(value, _IS_LOOKED_UP):
                asked = conditions.constant(_defined)
                conditions.require(f"{asked}({owner}, {name!r}) is {conditions.constant(value)}")
                continue
            # A class method is bound again each time.
            end = ".__func__" if isinstance(value, classmethod) else ""
            looked_up = f"{owner}.{name}" if name.isidentifier() else f"getattr({owner}, {name!r})"
            held = getattr(kind, name)
            before = conditions.constant(held.__func__ if end else held)
            conditions.require(f"{looked_up}{end} is {before}")
    if functions:
        _require_code(conditions, functions)
    require_hooks(conditions)


def _defined(kind: type, name: str) -> Any:
    """What a class or one that it inherits from has under a name, as it is written there."""
    for base in kind.__mro__:
        own = vars(base)
        if name in own:
            return own[name]
    return None


def _require_code(conditions: Conditions, functions: Iterable[types.FunctionType]) -> None:
    """Require functions to keep their code: none has got another, or at least not these."""
    counted = replacements()
    asked, count = conditions.constant(counted), counted.count
    same = [
        f"{conditions.constant(function)}.__code__ is {conditions.constant(function.__code__)}"
        for function in functions
    ]
    conditions.require(f"({asked}.count == {count} or ({' and '.join(same)}))")


def require_hooks(conditions: Conditions) -> None:
    """Require the hooks of all modules to stay as they are."""
    hooks: list[dict[int, Any]] = [vars(module)[name] for name in STORES]
    for store in hooks:
        name = conditions.constant(store)
        if any(hooks):
            before = conditions.constant([*store.values()])
            conditions.require(f"[*{name}.values()] == {before}")
        else:
            conditions.require(f"not {name}")
