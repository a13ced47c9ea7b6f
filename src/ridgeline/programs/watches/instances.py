"""What classes of classes decide: what abstract classes and protocols take for their instances, say.

To torch's compiler `isinstance` is settled by the class of the object. A class may be registered with an
abstract one later, and an object may get the method that a protocol asks for.
"""

import abc
import copy
import dataclasses
import dis
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy
import torch
from torch._dynamo import variables
from torch._dynamo.source import NumpyTensorSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import LazyVariableTracker, lists, user_defined
from torch._dynamo.variables import builder as builders
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import (
    compare,
    compare_by_name,
    content_of,
    resolved,
    value_of,
)
from ridgeline.programs.watches.left_to_python import is_marked
from ridgeline.reach.owners import is_users, is_users_class

_OF_EVERY_CLASS = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__"})
_OF_MEMBERS = ("_member_map_", "_value2member_map_", "_member_names_")
"""Where an enumeration keeps its members."""
_OF_SHAPES = frozenset({"_fields", "__slots__", "__match_args__"})
"""Where a class says which attributes its objects have."""
_MATCH_CLASS = dis.opmap["MATCH_CLASS"]
_is_instance_in_torch: Any = BuiltinVariable.call_isinstance
_fields_in_torch: Any = builders._dataclasses_fields_lambda  # noqa: SLF001
_PLAIN = (bool, int, float, complex, str, bytes)
_NO_OBJECTS = (type, types.ModuleType, types.FunctionType, torch.Tensor)


def classes_in_cells(value: Any) -> tuple[type, ...]:
    """The classes in a function's closure, which the compiler does not compare."""
    if not isinstance(value, types.FunctionType) or value.__closure__ is None:
        return ()
    # An empty cell, of a name that has no value yet, is compared with what it was like any other.
    contents = [getattr(cell, "cell_contents", None) for cell in value.__closure__]
    return tuple(content for content in contents if isinstance(content, type))


def instance_checks(values: Sequence[Any]) -> list[Callable[[Any], bool]]:
    """For each class of the user's that decides itself, whether its instances are those of now.

    Each takes an argument, the local variables of a call, which say nothing of it.

    Args:
        values: What a program reads, classes and objects.

    Cost: A check takes 0.1 us for an abstract class while none is registered anywhere, else 0.5 us a value.
    """
    given = (part for value in values for part in (value, *classes_in_cells(value)))
    objects = [found for value in values if (found := _reference(value)) is not None]
    checks: list[Callable[[Any], bool]] = []
    for kind in dict.fromkeys(filter(_decides_itself, given)):
        try:
            now = _instances(kind, objects)
        except TypeError:  # a protocol that cannot be asked, which no program asks
            continue
        checks.append(functools.partial(_is_as_before, kind, objects, now, _token(kind)))
    return checks


def _reference(value: Any) -> Callable[[], Any] | None:
    if isinstance(value, _NO_OBJECTS) and not (isinstance(value, type) and is_users_class(value)):
        return None
    try:
        return weakref.ref(value)
    except TypeError:  # a number or a list, which no user's class has for an instance by itself
        return None


def _decides_itself(value: Any) -> bool:
    if not isinstance(value, type) or not (is_users_class(value) or type(value) is abc.ABCMeta):
        return False
    return type(value).__instancecheck__ is not type.__instancecheck__


def _instances(kind: type, objects: Iterable[Callable[[], Any]]) -> list[bool]:
    return [
        issubclass(value, kind) if isinstance(value, type) else isinstance(value, kind)
        for value in (ask() for ask in objects)
    ]


def _token(kind: type) -> Any:
    """What changes where a class is registered; of others than abstract classes nothing is known."""
    return abc.get_cache_token() if type(kind) is abc.ABCMeta else None


def _is_as_before(
    kind: type, objects: Iterable[Callable[[], Any]], now: list[bool], token: Any, _: Any
) -> bool:
    is_unchanged = token is not None and abc.get_cache_token() == token
    return is_unchanged or _instances(kind, objects) == now


def require_metaclass(builder: Any, guard: Guard) -> None:
    """A `Guard` on what a class finds in a class of its own that is the user's."""
    value = value_of(builder, guard)
    if check := metaclass_check(value):
        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(check, [f"the class of {guard.name} changed"], None)


def require_members(builder: Any, guard: Guard) -> None:
    """A `Guard` on the members of an enumeration, by name and by value, which the compiler looks up once."""
    value = value_of(builder, guard)
    if isinstance(value, enum.EnumMeta):
        stores: list[Any] = [vars(value)[name] for name in _OF_MEMBERS if name in vars(value)]
        held = [copy.copy(store) for store in stores]

        def is_same(_: Any) -> bool:
            return stores == held  # members are compared by identity first

        manager = builder.get_guard_manager(guard)
        manager.add_lambda_guard(is_same, [f"a member of {guard.name} changed"], None)


def names_attributes(code: Iterable[types.CodeType]) -> bool:
    """Whether code asks a class what attributes its objects have, as `match` does."""
    return any(
        not _OF_SHAPES.isdisjoint(part.co_names) or _matches(part.co_code)
        for part in code
        if is_users(part.co_filename)
    )


def _matches(code: bytes) -> bool:
    return _MATCH_CLASS in code[::2]


def require_shapes(builder: Any, guard: Guard) -> None:
    """A `Guard` on what classes of the user's say of their objects' attributes; constants to torch 2.11."""
    value = value_of(builder, guard)
    kinds = (value if isinstance(value, type) else type(value), *classes_in_cells(value))
    for kind in filter(is_users_class, kinds):
        root, what = builder.guard_manager.root, f"the attributes that {kind.__name__} names"
        compare(root, lambda _, kind=kind: [_shape(kind, n) for n in _OF_SHAPES], None, what)


def _shape(kind: type, name: str) -> Any:
    return content_of(getattr(kind, name, None))


def require_class_of_plain(builder: Any, guard: Guard) -> None:
    """A `Guard` on the class of a number or text, where it is the user's.

    To the compiler it is a number or text like any other, whatever methods the class gets.
    """
    value = value_of(builder, guard)
    kind = type(value)
    if isinstance(value, _PLAIN) and kind not in _PLAIN and is_users_class(kind):
        manager = builder.get_guard_manager(guard)
        compare(manager, lambda _: _of_class(kind), None, f"the class of {guard.name}")


def metaclass_check(kind: Any) -> Callable[[Any], bool] | None:
    """Whether a class finds in a class of its own what it does now; None where that is not the user's."""
    if not isinstance(kind, type) or not _is_users_metaclass(type(kind)):
        return None
    kept = _of_metaclass(kind)
    held = content_of(kept)

    def is_same(_: Any, _kept: Any = kept) -> bool:  # which keeps their numbers from others
        return content_of(_of_metaclass(kind)) == held

    return is_same


def _of_class(kind: type) -> list[tuple[type, dict[str, Any]]]:
    return [(base, dict(vars(base))) for base in kind.__mro__ if is_users_class(base)]


def _is_users_metaclass(kind: type) -> bool:
    return kind is not type and any(map(is_users_class, kind.__mro__))


def _of_metaclass(value: type) -> dict[tuple[int, str], Any]:
    """What the user's classes of a class hold, by place in their order and name."""
    return {
        (place, name): held
        for place, base in enumerate(type(value).__mro__)
        if is_users_class(base)
        for name, held in vars(base).items()
        if name not in _OF_EVERY_CLASS
    }


def ask_for_slots_anew() -> None:
    """Have the compiler of this process ask a class each time which special methods it has; again, too.

    A class may get one (`__len__`, `__add__`) while Python runs. Torch's compiler (2.13) asks a class once,
    and remembers that for the whole process, whatever is compiled anew; of the class that it asked last it
    remembers the fields of a named tuple.
    """
    for module in (builders, lists, user_defined):
        fields: Any = getattr(module, "namedtuple_fields", None)
        if hasattr(fields, "cache_clear"):
            module.namedtuple_fields = fields.__wrapped__  # type: ignore[attr-defined]
    protocol: Any = getattr(variables, "object_protocol", None)
    if hasattr(protocol, "_get_cached_slots"):
        protocol._get_cached_slots = protocol.get_type_slots  # noqa: SLF001 - it has no setting for that


def follow_instances() -> None:
    """Have the compiler of this process say what numbers of NumPy's are, and compare which fields there are.

    To torch's compiler (2.11 to 2.13) such a number is an array, and a data class has the fields that it had.
    """
    BuiltinVariable.call_isinstance = _is_instance  # type: ignore[method-assign]
    builders._dataclasses_fields_lambda = _fields  # noqa: SLF001 - it has no hook


def _is_instance(builtin: Any, tx: Any, arg: Any, kinds: Any) -> Any:
    """In place of torch's `isinstance`."""
    # Others need not be looked at for their class.
    if type.__instancecheck__(LazyVariableTracker, arg) and (
        arg.is_realized() or isinstance(arg.original_value(), numpy.generic)
    ):
        arg = arg.realize()
    is_array = type.__instancecheck__(NumpyNdarrayVariable, arg)
    if not (is_array and is_marked(tx.output.compiler_fn)):
        return _is_instance_in_torch(builtin, tx, arg, kinds)
    source = arg.source.base if isinstance(arg.source, NumpyTensorSource) else arg.source
    value = None if source is None else resolved(tx.output, source)
    if isinstance(value, numpy.generic):
        tx.output.guards.add(Guard(source, _require_class))
        return ConstantVariable.create(isinstance(value, kinds.as_python_constant()))
    return _is_instance_in_torch(builtin, tx, arg, kinds)


def _require_class(builder: Any, guard: Guard) -> None:
    # By name, since to the compiler it is an array made of the number.
    compare_by_name(builder, guard.name, type, "the class of ")


def _fields(obj: Any) -> Any:
    """In place of torch's: the fields of a data class's object."""
    output = InstructionTranslator.current_tx().output
    if obj.source is not None and is_marked(output.compiler_fn):
        output.guards.add(Guard(obj.source, _require_fields))
    return _fields_in_torch(obj)


def _require_fields(builder: Any, guard: Guard) -> None:
    if dataclasses.is_dataclass(value_of(builder, guard)):
        compare_by_name(builder, guard.name, dataclasses.fields, "the fields of ")
