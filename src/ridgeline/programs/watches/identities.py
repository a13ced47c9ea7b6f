"""Which of a program's objects are one: code may ask with `is`, `==` and `in`, or write to both.

Torch's compiler compares each object by itself. It also takes for granted that two names mean one object
where one of them begins at an argument and the other at a variable of a module (2.11 to 2.13).
"""

import dis
import functools
import math
import operator
import re
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch._dynamo import exc, variables
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import builder as builders
from torch._dynamo.variables import builtin
from torch._dynamo.variables.constant import ConstantVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import MISSING, UNKNOWN, of_name, resolved, value_of
from ridgeline.programs.watches.left_to_python import is_marked, is_plain_value, refuse
from ridgeline.reach.owners import is_users, is_users_class

_CONTAINERS = (list, dict, set)
_SINGLE = (bool, types.NoneType)
_NEAR = 6
"""So many instructions before a comparison give what is compared: two attributes of attributes."""
_OF_MODULES = ("_hooks", "_parameters", "_buffers", "_modules")
"""Ends of names of what torch keeps in each module."""


_LAST = re.compile(r"(\w+)(?:'\])?$")
"""The last part of a name of the compiler's: an attribute or a key."""
_NAN = (
    "nan compared in a container, where Python asks whether it is the same object; ask with math.isnan(...) "
    "before"
)
_EQUALITIES = (operator.eq, operator.ne, operator.contains)
_IDENTITIES = (operator.is_, operator.is_not)
_protocol: Any = getattr(variables, "object_protocol", None)
"""Where a version of torch (2.13) has one function for all comparisons of identities."""
_name = "vt_identity_compare"
_compare_in_torch: Any = getattr(_protocol, _name, None)
_list_in_torch: Any = variables.BaseListVariable.call_method
_dupe_in_torch: Any = builders.make_dupe_guard


def follow_identities() -> None:
    """Have the compiler of this process guard what it finds one, or not one; again, too.

    Programs of other backends are compiled as before.
    """
    builders.make_dupe_guard = _found_again  # type: ignore[assignment]
    if _compare_in_torch is None:
        variables.BaseListVariable.call_method = _call_of_list  # type: ignore[method-assign]
    else:
        setattr(_protocol, _name, _compare)
        # Where code asks with `is`: the other asks for what is equal, too.
        setattr(builtin, _name, functools.partial(_compare, is_exact=True))


def _found_again(source: Any, first: Any) -> Any:
    """In place of torch's: the guard of an object that was found before, under another name."""
    guard = _dupe_in_torch(source, first)
    is_unguarded = guard is None and first is not None and first != source
    return functools.partial(_require_identity, first) if is_unguarded and _is_ours() else guard


def _compare(left: Any, right: Any, *, is_exact: bool = False) -> Any:
    """In place of torch's: whether two objects of a program are one, None where that is unknown."""
    result = _compare_in_torch(left, right)
    one, other = (getattr(part, "source", None) for part in (left, right))
    if one is None or other is None or one == other or not _is_ours():
        return result
    output = InstructionTranslator.current_tx().output
    values = [resolved(output, source) for source in (one, other)]
    if UNKNOWN not in values:
        # To torch each tuple and each partial function is another than all others: it makes them anew.
        result = ConstantVariable.create(values[0] is values[1])
    if result is not None:
        require = functools.partial(_require_identity, other, is_exact=is_exact)
        output.guards.add(Guard(one, require))
    return result


def _is_ours() -> bool:
    return is_marked(InstructionTranslator.current_tx().output.compiler_fn)


def _require_identity(other: Any, builder: Any, guard: Guard, *, is_exact: bool = False) -> None:
    """A `Guard` on whether what it is about is what another source gives."""
    name = other.name if isinstance(other.name, str) else other.name()  # a method before torch 2.12
    of_other = Guard(other, functools.partial(_require_identity, other))
    values = value_of(builder, guard), value_of(builder, of_other)
    if all(map(is_plain_value, values)) or any(value is UNKNOWN for value in values):
        return
    find, find_other = of_name(builder, guard.name), of_name(builder, name)
    is_one = values[0] is values[1]

    def is_same(now: Any) -> bool:
        try:
            return (find(now) is find_other(now)) == is_one
        except MISSING:  # what is compared of the way to it is compared later
            return False

    what = f"whether {guard.name} is {name} changed"
    builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def answer_identity(function: Any, args: Sequence[Any]) -> Any:
    """What `is` gives for tuples, nan and partial functions that a program holds, in torch 2.11.

    `==` for these functions, too; None for all else.

    Also refuses comparisons of containers that hold `nan`: Python asks first whether that is one object.
    """
    if _compare_in_torch is not None or len(args) != 2:
        return None
    if function in _EQUALITIES and any(map(_has_nan, args)):
        refuse("nan", _NAN, "The compiler makes another object of it.")
    sources = [part.source for part in args]
    if function not in (*_EQUALITIES, *_IDENTITIES) or None in sources:
        return None
    output = InstructionTranslator.current_tx().output
    one, other = (resolved(output, source) for source in sources)
    pair = (one, other)
    is_known = all(isinstance(value, tuple) for value in pair) or all(map(is_nan, pair))
    # Partial functions are equal where they are one.
    is_partial = all(type(value) is functools.partial for value in pair)
    if not is_partial and (function not in _IDENTITIES or not is_known):
        return None
    if sources[0] != sources[1]:
        require = functools.partial(_require_identity, sources[1], is_exact=True)
        output.guards.add(Guard(sources[0], require))
    return ConstantVariable.create(function(one, other))


def _call_of_list(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """In place of the methods of lists and tuples in torch 2.11."""
    if name == "__contains__" and _is_ours() and _has_nan(variable):
        if tx.one_graph:
            raise exc.TorchDynamoException(_NAN)
        raise exc.SkipFrame(_NAN)  # what is refused is asked again of each element
    return _list_in_torch(variable, tx, name, args, kwargs)


def _has_nan(variable: Any) -> bool:
    """Whether it is a list or tuple that holds one."""
    known = variable.realize()
    if isinstance(known, ConstantVariable):
        return isinstance(known.value, tuple) and any(map(is_nan, known.value))
    items = getattr(known, "items", ())
    return isinstance(items, list) and any(_is_or_has_nan(item.realize()) for item in items)


def _is_or_has_nan(variable: Any) -> bool:
    is_number = isinstance(variable, ConstantVariable) and is_nan(variable.value)
    return is_number or _has_nan(variable)


def asks_identity(code: Iterable[types.CodeType]) -> bool:
    """Whether code of the user's compares with `is`, but for constants such as None, and is not followed."""
    return _compare_in_torch is None and any(
        is_users(part.co_filename) and _asks(part) for part in code
    )


def is_nan(value: Any) -> bool:
    """Whether a value is `nan`: such an object equals itself only, and only where it is looked for."""
    return isinstance(value, float) and math.isnan(value)


def plain_names(named: Iterable[tuple[str, Any]], code: Iterable[types.CodeType]) -> list[str]:
    """Which of the compiler's names are of numbers, texts or tuples of such that code of the user's compares.

    Args:
        named: Names, and what each gives.
        code: Of the functions that were read.
    """
    asked = frozenset().union(*(_compared(part) for part in code if is_users(part.co_filename)))
    if not asked:
        return []
    return [
        name
        for name, value in named
        if is_plain_value(value)
        and not isinstance(value, _SINGLE)
        and asked.intersection(_LAST.findall(name))
    ]


def _compared(code: types.CodeType) -> set[str]:
    """Names near comparisons with `is` of what is no constant of the code."""
    found: set[str] = set()
    read = [*dis.get_instructions(code)]
    for place, instruction in enumerate(read):
        if instruction.opname == "IS_OP" and read[place - 1].opname != "LOAD_CONST":
            before = read[max(0, place - _NEAR) : place]
            found.update(str(one.argval) for one in before if one.opname.startswith("LOAD_"))
    return found


def may_be_one(name: str, value: Any) -> bool:
    """Whether an object is one that code of the user's may share: of the user's class, or a container."""
    if isinstance(value, type):
        return False
    return is_users_class(type(value)) or (
        type(value) in _CONTAINERS and not name.rstrip("]'").endswith(_OF_MODULES)
    )


def pattern(values: Sequence[Any]) -> list[int]:
    """For each object the first place at which it stands."""
    first: dict[int, int] = {}
    return [first.setdefault(id(value), place) for place, value in enumerate(values)]


def _asks(code: types.CodeType) -> bool:
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and before is not None and before.opname != "LOAD_CONST":
            return True
        before = instruction
    return False
