"""Where a step's code has gradients computed that are differentiated again, as penalties on gradients are.

A step may do so every k-th time only (the lazy penalty of StyleGAN2), so no trial of some steps shows it: the
code says. It is followed by name, from the loss function and `forward` of the modules through what they call.
"""

import ast
import dis
import functools
import linecache
import types
from typing import Any

import torch
from torch import nn

from ridgeline.reach.reach import names_in
from ridgeline.reach.step_code import place_of, step_code

_PLACES = {
    "create_graph": {"grad": 4, "autograd.backward": 3, "backward": 2},
    "retain_graph": {"grad": 3, "autograd.backward": 2, "backward": 1},
}
"""The places of both among the positional arguments of torch's functions."""
_FUNCTIONAL = "torch.autograd.functional"
"""Its functions compute most of their results by a backward pass through another."""


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


def _place_of(keyword: str, model: nn.Module, loss_fn: Any) -> str:
    found = (_asks(keyword, code, names) for code, names in step_code(model, loss_fn))
    return next((place for place in found if place), "")


def _asks(keyword: str, code: types.CodeType, names: dict[str, Any]) -> str:
    """Where code, or a function written inside of it, asks for them."""
    for part in code.co_consts:
        if isinstance(part, types.CodeType) and (place := _asks(keyword, part, names)):
            return place
    is_named = keyword == "create_graph" and _names_functional(code, names)
    # In constants it stands as a key of a dictionary, which may be unpacked.
    if is_named or keyword in code.co_consts or _passes(keyword, code, names):
        return place_of(code)
    return ""


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
    # In their order: `torch.autograd.Variable` and `torch.nn.functional` often stand side by side.
    if any("functional" in name for name in code.co_names):
        in_order = (one.argval for one in dis.get_instructions(code) if one.opcode in dis.hasname)
        if "autograd.functional" in ".".join(in_order):
            return True
    found = (names[name] for name in names_in(code) & names.keys())
    return any(
        getattr(value, "__name__", "") == _FUNCTIONAL
        or (isinstance(value, types.FunctionType) and value.__module__ == _FUNCTIONAL)
        for value in found
    )
