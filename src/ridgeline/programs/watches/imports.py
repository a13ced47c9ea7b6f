"""Modules that code imports while it runs: each run takes what `sys.modules` holds under the name then.

Torch's compiler compares what was read from such a module, takes for granted that the name still means it,
and goes on with the first module of a name that the process has imported. Of names that a module does not
have it compares nothing, be they Python's own (`max`), which the module may get, or be put among those.
"""

import builtins
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch._dynamo import symbolic_convert
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.misc import PythonModuleVariable
from torch._guards import Guard

from ridgeline.programs.watches.comparing import value_of
from ridgeline.programs.watches.left_to_python import is_marked, refuse
from ridgeline.reach.owners import is_users
from ridgeline.reach.reach import names_in

_GLOBALS = re.compile(r"G\['__import_\w+'\]")
"""The compiler's name of a module whose own functions read variables of it: no code asks others so."""
_in_torch: Any = symbolic_convert._import_module  # noqa: SLF001 - which keeps the first
_source_in_torch: Any = InstructionTranslatorBase.import_source
_attribute_in_torch: Any = PythonModuleVariable.var_getattr


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
    PythonModuleVariable.var_getattr = _attribute  # type: ignore[method-assign]


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


def own_builtins(code: Iterable[types.CodeType]) -> list[str]:
    """What code of the user's may find among Python's own names and Python has not put there."""
    own = vars(builtins)
    names = _names_of_users(code)
    return [
        name
        for name in sorted(names & own.keys())
        if getattr(own[name], "__module__", None) != builtins.__name__
    ]


def require_names_of_python(
    code: Sequence[types.CodeType],
    functions: Iterable[types.FunctionType],
    builder: Any,
    _: Guard,
) -> None:
    """A `Guard` on names that functions find among Python's: their modules have none of these.

    `code` is that of all functions that were read, `functions` are the user's that the program calls.
    """
    scope = builder.scope["G"]
    asked = {id(scope): (scope, _names_of_users(code))}
    for function in functions:
        own = function.__globals__
        _, names = asked.setdefault(id(own), (own, set()))
        names.update(_names_of_users([function.__code__]))
    free = [
        (own.keys(), frozenset(names & vars(builtins).keys() - own.keys()))
        for own, names in asked.values()
    ]
    free = [(own, names) for own, names in free if names]

    def is_same(_: Any) -> bool:
        for own, names in free:  # noqa: SIM110 - `all` makes a generator, in every call
            if not own.isdisjoint(names):
                return False
        return True

    if free:
        what = "a module got a name that stood for one of Python's"
        builder.guard_manager.root.add_lambda_guard(is_same, [what], None)


def _names_of_users(code: Iterable[types.CodeType]) -> set[str]:
    users = (part for part in code if is_users(part.co_filename))
    return set().union(*map(names_in, users))


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


def _attribute(variable: Any, tx: Any, name: str) -> Any:
    """In place of the method of `PythonModuleVariable`, which looks for a module's own variables first."""
    kind = type(variable.value)
    found = [vars(base)[name] for base in kind.__mro__ if name in vars(base)]
    is_hidden = bool(found) and hasattr(type(found[0]), "__set__") and name in vars(variable.value)
    if is_hidden and is_marked(tx.output.compiler_fn):
        module = variable.value.__name__
        refuse(
            name,
            f"{name} of {module}, whose class {kind.__qualname__} has a property of that name before the "
            "module's own variable, where a captured program does not look; give one of them another name",
            "The compiler would take the module's own variable.",
        )
    return _attribute_in_torch(variable, tx, name)


def _is_named(module: str, names: frozenset[str]) -> bool:
    """Whether code may import it: by its name, by one that is relative to a package, or with a part of it."""
    inside = f"{module}."
    parts = module.split(".")
    ends = {".".join(parts[k:]) for k in range(len(parts))}
    return not ends.isdisjoint(names) or any(name.startswith(inside) for name in names)


def _is_users_module(one: Import) -> bool:
    file = vars(one.module).get("__file__")  # without a call of the user's `__getattr__`
    if file is None:  # built in, or made by hand
        return one.name.partition(".")[0] not in sys.stdlib_module_names
    return is_users(file)
