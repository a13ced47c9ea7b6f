"""The Python code that a step may run, followed by name from its loss function and its modules' `forward`."""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from ridgeline.reach.owners import is_users
from ridgeline.reach.reach import CONTAINERS, Reach, contents, contents_of, methods_of, names_in

Code = tuple[types.CodeType, dict[str, Any]]
"""Code, and the globals that it names."""

_ROOTS = frozenset({"forward", "__call__"})


def step_code(model: Any, loss_fn: Any, reach: Reach | None = None) -> Iterator[Code]:
    """Each piece of code that may run, once; that of torch left out, that of other libraries' modules not.

    Code that runs by a name made at run time is not seen.

    Args:
        model: Its modules' classes are looked into; of a single callable that itself.
        loss_fn: The loss of a step.
        reach: What both can reach, where it is known already.

    Cost: Walks what they can reach, see `Reach`: milliseconds, more for models of thousands of modules.
    """
    reach = reach or Reach(model, loss_fn)
    methods = _methods(reach)
    named = _named_only(reach) - {id(loss_fn)}
    functions = [
        function
        for function in reach.functions
        if not (is_torchs(function.__module__) or id(function) in named)
    ]
    codes: list[Code] = [(function.__code__, function.__globals__) for function in functions]
    open_names, known = set(_ROOTS), set[str]()
    seen: set[types.CodeType] = set()
    while codes or open_names:
        if not codes:
            name = open_names.pop()
            # Once a name: methods call each other in circles.
            known.add(name)
            codes += methods.get(name, [])
            continue
        code, names = codes.pop()
        if code in seen:
            continue
        seen.add(code)
        yield code, names
        open_names |= names_in(code) - known
        codes += _called(code, names)


def place_of(code: types.CodeType) -> str:
    """Where code stands, as `penalty (loss.py:12)`."""
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def is_torchs(module: str | None) -> bool:
    """Whether a module is a part of torch, by its name."""
    return (module or "").partition(".")[0] == "torch"


def _named_only(reach: Reach) -> set[int]:
    """Numbers of functions that only variables of modules hold: they run where code names them."""
    cells = [cell.owner for cell in reach.cells if isinstance(cell.owner, types.CellType)]
    held = {*map(id, contents(cells))}
    for value in reach.seen.values():
        if isinstance(value, (*CONTAINERS, tuple, frozenset)):
            held.update(map(id, contents_of(value)))
        elif isinstance(value, functools.partial):
            held.add(id(value.func))
        elif isinstance(value, types.MethodType):
            held.add(id(value.__func__))
    of_modules = (cell for cell in reach.cells if type(cell.owner) is dict)
    return {id(cell.owner.get(cell.name)) for cell in of_modules} - held


def _methods(reach: Reach) -> dict[str, list[Code]]:
    """Code of the classes that a step can reach, by the name of the method; libraries' modules included."""
    found: dict[str, list[Code]] = {}
    kinds = {kind for module in reach.modules for kind in type(module).__mro__}
    for kind in {*kinds, *reach.classes}:
        if is_torchs(kind.__module__) or kind is object:
            continue
        for name, function in methods_of(kind):
            names = getattr(function, "__globals__", {})
            found.setdefault(name, []).append((function.__code__, names))
    return found


def _called(code: types.CodeType, names: dict[str, Any]) -> Iterator[Code]:
    """Functions that the globals of code name, also as parts of a module."""
    used = names_in(code)
    found = [names[name] for name in used & names.keys()]
    # It may import modules of the user's itself.
    imported = [sys.modules[name] for name in used & sys.modules.keys()]
    found += [module for module in imported if is_users(getattr(module, "__file__", None) or "")]
    for value in found:
        parts = [value]
        if isinstance(value, types.ModuleType) and not is_torchs(value.__name__):
            parts = [vars(value)[part] for part in used & vars(value).keys()]
        for part in parts:
            if isinstance(part, types.FunctionType) and not is_torchs(part.__module__):
                yield part.__code__, part.__globals__
