"""Modules that code imports while it runs: each run takes what `sys.modules` holds under the name then.

Torch's compiler compares what was read from such a module, takes for granted that the name still means it,
and goes on with the first module of a name that the process has imported. Of names that a module does not
have it compares nothing.
"""

import re
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch._dynamo import symbolic_convert
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._guards import Guard

from ridgeline.programs.watches.comparing import value_of
from ridgeline.reach.owners import is_users

_GLOBALS = re.compile(r"G\['__import_\w+'\]")
"""The compiler's name of a module whose own functions read variables of it: no code asks others so."""
_in_torch: Any = symbolic_convert._import_module  # noqa: SLF001 - which keeps the first
_source_in_torch: Any = InstructionTranslatorBase.import_source


class Import(NamedTuple):
    """A module of the user's that was imported.

    Attributes:
        name: In `sys.modules`.
        module: What was imported.
    """

    name: str
    module: types.ModuleType


def follow_imports() -> None:
    """Have the compiler of this process take modules as `sys.modules` holds them; again, too."""
    symbolic_convert._import_module = _import_module  # type: ignore[assignment]  # noqa: SLF001
    InstructionTranslatorBase.import_source = _import_source  # type: ignore[method-assign]


def imports_of(
    code: Iterable[types.CodeType], sources: Mapping[str, str], scope: Mapping[str, Any]
) -> tuple[Import, ...]:
    """What a program imports of the user's own; libraries stay what they are.

    Args:
        code: Of the functions that were read. The compiler has aliases for the modules that they lie in, too.
        sources: Names of modules by the compiler's aliases.
        scope: Where these are kept.
    """
    found = (Import(name, scope[alias]) for alias, name in sources.items() if alias in scope)
    named = frozenset().union(*(part.co_names for part in code))
    return tuple(
        one
        for one in found
        if sys.modules.get(one.name) is one.module
        and _is_users_module(one)
        and _is_named(one.name, named)
    )


def are_current(imports: tuple[Import, ...]) -> bool:
    """Whether their names still mean the same modules.

    Cost: 0.1 us each.
    """
    return all(sys.modules.get(one.name) is one.module for one in imports)


def require_module(names: frozenset[str], builder: Any, guard: Guard) -> None:
    """A `Guard` on a module of the user's: it has none of the names that code asks for and it has not."""
    module = value_of(builder, guard)
    is_asked = isinstance(module, types.ModuleType) and not _GLOBALS.fullmatch(guard.name)
    if not is_asked or not _is_users_module(Import(module.__name__, module)):
        return
    own, kind = vars(module), type(module)
    missing, count = (names | {"__getattr__"}) - own.keys(), len(own)

    def is_same(now: Any) -> bool:
        # Modules of scripts get new names all the time.
        is_missing = len(own) == count or own.keys().isdisjoint(missing)
        return is_missing and type(now) is kind

    manager = builder.get_guard_manager(guard)
    manager.add_lambda_guard(is_same, [f"what {guard.name} lacks changed"], None)


def _import_module(name: str) -> Any:
    return sys.modules.get(name) or _in_torch(name)


def _import_source(translator: Any, name: str) -> Any:
    """Without the alias of a module that was replaced, with which the compiler cannot read the new one."""
    scope = translator.output.global_scope
    alias = f"__import_{name.replace('.', '_dot_')}"
    if alias in scope and scope[alias] is not _import_module(name):
        # The compiler asserts that an alias means one module for good.
        del scope[alias]
    return _source_in_torch(translator, name)


def _is_named(module: str, names: frozenset[str]) -> bool:
    """Whether code may import it: by its name, by one that is relative to a package, or with a part of it."""
    inside = f"{module}."
    parts = module.split(".")
    ends = {".".join(parts[k:]) for k in range(len(parts))}
    return not ends.isdisjoint(names) or any(name.startswith(inside) for name in names)


def _is_users_module(one: Import) -> bool:
    file = getattr(one.module, "__file__", None)
    if file is None:  # built in, or made by hand
        return one.name.partition(".")[0] not in sys.stdlib_module_names
    return is_users(file)
