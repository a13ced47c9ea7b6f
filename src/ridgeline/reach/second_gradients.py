"""Where a step's code has gradients computed that are differentiated again, as penalties on gradients are.

A step may do so every k-th time only (the lazy penalty of StyleGAN2), so no trial of some steps shows it: the
code says. It is followed by name, from the loss function and `forward` of the modules through what they call.
"""

import ast
import functools
import linecache
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.reach.reach import Reach, methods_of, names_in

_PLACES = {
    "create_graph": {"grad": 4, "autograd.backward": 3, "backward": 2},
    "retain_graph": {"grad": 3, "autograd.backward": 2, "backward": 1},
}
"""The places of both among the positional arguments of torch's functions."""
_FUNCTIONAL = "torch.autograd.functional"
"""Its functions compute most of their results by a backward pass through another."""
_ROOTS = frozenset({"forward", "__call__"})


def second_gradients(model: nn.Module, loss_fn: Any) -> str:
    """The place that asks for gradients of gradients, `penalty (loss.py:12)`; empty if none does.

    What passes `create_graph=False` asks for none. Code that runs by a name made at run time is not seen; of
    code without source all that names it asks, and what passes it by its place is not seen.

    Args:
        model: Its modules' classes are looked into, those of torch left out.
        loss_fn: The loss of a step.

    Cost: Walks what they can reach, see `Reach`: milliseconds, more for models of thousands of modules.
    """
    return _place_of("create_graph", model, loss_fn)


def retained_graphs(model: nn.Module, loss_fn: Any) -> str:
    """The place that keeps what a backward pass needs for another one (`retain_graph=True`); likewise."""
    return _place_of("retain_graph", model, loss_fn)


def differentiated_gradients(optimizer: Optimizer) -> str:
    """The place where an optimizer differentiates gradients again, as for a trace of the Hessian; likewise.

    It multiplies them by a vector, so that torch's function is given `grad_outputs`; gradients of a loss that
    a closure returns need none.

    Args:
        optimizer: The methods of its classes are looked into, those of torch left out.
    """
    for kind in type(optimizer).__mro__:
        for _, function in methods_of(kind):
            code, names = function.__code__, getattr(function, "__globals__", {})
            found = {
                "autograd" if names.get(n) is torch.autograd.grad else n for n in names_in(code)
            }
            products = (
                one for one in code.co_consts if isinstance(one, tuple) and "grad_outputs" in one
            )
            if not _is_torchs(kind.__module__) and "autograd" in found and any(products):
                return _written(code)
    return ""


def _place_of(keyword: str, model: nn.Module, loss_fn: Any) -> str:
    reach = Reach(model, loss_fn)
    methods = _methods(reach)
    functions = [function for function in reach.functions if not _is_torchs(function.__module__)]
    codes = [(function.__code__, function.__globals__) for function in functions]
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
        place = _asks(keyword, code, names)
        if place:
            return place
        open_names |= names_in(code) - known
        codes += _called(code, names)
    return ""


def _methods(reach: Reach) -> dict[str, list[tuple[types.CodeType, dict[str, Any]]]]:
    """Code of the classes that a step can reach, by the name of the method; libraries' modules included."""
    found: dict[str, list[tuple[types.CodeType, dict[str, Any]]]] = {}
    kinds = {kind for module in reach.modules for kind in type(module).__mro__}
    for kind in {*kinds, *reach.classes}:
        if _is_torchs(kind.__module__) or kind is object:
            continue
        for name, function in methods_of(kind):
            names = getattr(function, "__globals__", {})
            found.setdefault(name, []).append((function.__code__, names))
    return found


def _is_torchs(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


def _called(
    code: types.CodeType, names: dict[str, Any]
) -> Iterator[tuple[types.CodeType, dict[str, Any]]]:
    """Functions that the globals of code name, also as parts of a module."""
    used = names_in(code)
    for name in used & names.keys():
        value = names[name]
        parts = [value]
        if isinstance(value, types.ModuleType) and not _is_torchs(value.__name__):
            parts = [vars(value)[part] for part in used & vars(value).keys()]
        for part in parts:
            if isinstance(part, types.FunctionType) and not _is_torchs(part.__module__):
                yield part.__code__, part.__globals__


def _asks(keyword: str, code: types.CodeType, names: dict[str, Any]) -> str:
    """Where code, or a function written inside of it, asks for them."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType) and (place := _asks(keyword, part, names)):
            return place
    is_named = keyword == "create_graph" and _names_functional(code, names)
    # In constants it stands as a key of a dictionary, which may be unpacked.
    if is_named or keyword in code.co_consts or _passes(keyword, code, names):
        return _written(code)
    return ""


def _written(code: types.CodeType) -> str:
    return f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{code.co_firstlineno})"


def _passes(keyword: str, code: types.CodeType, names: dict[str, Any]) -> bool:
    """Whether a call may pass it, by name or by its place among torch's, as else than `False` or `None`."""
    is_there = any(isinstance(part, tuple) and keyword in part for part in code.co_consts)
    given = {name: _name_in_torch(name, names) for name in code.co_names}
    if not (is_there or any(given.values())):
        return False
    last = max(line or 0 for _, _, line in code.co_lines())
    found = _nodes_in("".join(linecache.getlines(code.co_filename)))
    nodes = [node for node in found if code.co_firstlineno <= node.lineno <= last]
    if not nodes:  # there is no source of it
        return is_there
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            given[node.targets[0].id] = given.get(_name(node.value), "")
    for node in nodes:
        if isinstance(node, ast.Call):
            owner = _name(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            name = given.get(_name(node.func), "")
            if owner == "autograd" and name == "backward":
                name = "autograd.backward"
            if _gives(keyword, node, _PLACES[keyword].get(name)):
                return True
        elif isinstance(node, ast.Dict):
            keys = [getattr(key, "value", None) for key in node.keys]
            if keyword in keys and not _is_off(node.values[keys.index(keyword)]):
                return True
    return False


def _name_in_torch(name: str, names: dict[str, Any]) -> str:
    """What torch calls a function that code names, of `_PLACES`; empty for another one."""
    if name == "grad" or names.get(name) is torch.autograd.grad:
        return "grad"
    if names.get(name) is torch.autograd.backward:
        return "autograd.backward"
    return "backward" if name == "backward" else ""


def _gives(keyword: str, call: ast.Call, place: int | None) -> bool:
    """Whether a call gives an argument a value; `place` is that among the positional ones, if it has one."""
    given = [one.value for one in call.keywords if one.arg == keyword]
    if place is not None:
        given += call.args[place : place + 1]
        # It may be among what is unpacked.
        given += [one for one in call.args if isinstance(one, ast.Starred)]
        given += [one.value for one in call.keywords if one.arg is None]
    return not all(map(_is_off, given))


def _is_off(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


@functools.lru_cache(maxsize=64)
def _nodes_in(source: str) -> tuple[ast.Call | ast.Assign | ast.Dict, ...]:
    """The calls, assignments and dictionaries of a file."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # of a notebook's own commands
        return ()
    return tuple(n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.Assign | ast.Dict))


def _names_functional(code: types.CodeType, names: dict[str, Any]) -> bool:
    used = names_in(code)
    if {"autograd", "functional"} <= used and "torch" in used:
        return True
    found = (names[name] for name in used & names.keys())
    return any(
        getattr(value, "__name__", "") == _FUNCTIONAL
        or (isinstance(value, types.FunctionType) and value.__module__ == _FUNCTIONAL)
        for value in found
    )
