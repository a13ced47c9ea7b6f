"""Reading many places of a program at once, and looking whether its classes are what they were."""

import ast
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from torch.nn.modules import module

_CLASS_VARIABLE = re.compile(r"\.__mro__\[\d+\]\.__dict__\)\['(\w+)'\]")
_code: Callable[[types.FunctionType], types.CodeType] = attrgetter("__code__")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
"""Hooks of all modules, in `torch.nn.modules.module`."""


def reader(
    expressions: Sequence[str], scope: Mapping[str, Any]
) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function of `L`, the arguments by name, that gives the values of expressions.

    What expressions have in common, a path through modules say, is evaluated once.

    Args:
        expressions: Of Python, in terms of `L` and of the names in `scope`.
        scope: What else they name.

    Cost: When called, about 0.03 us for each attribute and index.
    """
    lines: list[str] = []
    variables: dict[str, str] = {}
    results = [_steps(ast.parse(text, mode="eval").body, lines, variables) for text in expressions]
    body = "".join(f"    {line}\n" for line in lines)
    source = f"def read(L):\n{body}    return ({''.join(f'{name}, ' for name in results)})\n"
    made: dict[str, Any] = {}
    exec(compile(source, "<places>", "exec"), dict(scope), made)
    return made["read"]


def _steps(node: ast.expr, lines: list[str], variables: dict[str, str]) -> str:
    """Adds the lines that evaluate an expression; the variable that then holds its value."""
    text = ast.unparse(node)
    if text in variables or isinstance(node, ast.Name):
        return variables.get(text, text)
    value = text
    if isinstance(node, ast.Attribute):
        value = f"{_steps(node.value, lines, variables)}.{node.attr}"
    elif isinstance(node, ast.Subscript):
        value = f"{_steps(node.value, lines, variables)}[{ast.unparse(node.slice)}]"
    variables[text] = f"v{len(variables)}"
    lines.append(f"{variables[text]} = {value}")
    return variables[text]


def class_variables(expressions: Iterable[str]) -> frozenset[str]:
    """Names that the compiler has looked up in classes, from its expressions."""
    return frozenset(name for text in expressions for name in _CLASS_VARIABLE.findall(text))


def watch_classes(
    classes: Iterable[type], code: frozenset[types.CodeType], names: frozenset[str]
) -> Callable[[], bool]:
    """A function that says whether methods and variables of classes are those of now.

    The compiler compares the class of an object, and takes for granted what is in most of them.

    Args:
        classes: Looked at with what they inherit.
        code: Of the functions that were read; which of the methods count.
        names: Of further variables that count.

    Cost: When called, 0.05 us for each method of a class.
    """
    attributes: list[tuple[type, str]] = []
    bound: list[tuple[type, str]] = []
    functions: list[types.FunctionType] = []
    for kind in classes:
        for name in {name for base in kind.__mro__ for name in vars(base)}:
            value = inspect.getattr_static(kind, name)
            function = _underlying(value)
            has_been_read = isinstance(function, types.FunctionType) and function.__code__ in code
            if has_been_read or name in names:
                (bound if isinstance(value, classmethod) else attributes).append((kind, name))
                functions += [function] if has_been_read else []
    owners, named = [kind for kind, _ in attributes], [name for _, name in attributes]
    before, before_bound = [*map(getattr, owners, named)], _bound_functions(bound)
    codes, hooks = [*map(_code, functions)], [vars(module)[name] for name in _GLOBAL_HOOKS]
    before_hooks = [[*store.values()] for store in hooks]
    has_hooks = any(before_hooks)

    def is_unchanged() -> bool:
        return (
            all(map(is_, map(getattr, owners, named), before))
            and [*map(_code, functions)] == codes
            and not (any(hooks) and not has_hooks)
            and not (has_hooks and [[*store.values()] for store in hooks] != before_hooks)
            and not (bound and _bound_functions(bound) != before_bound)
        )

    return is_unchanged


def _bound_functions(methods: Iterable[tuple[type, str]]) -> list[Any]:
    """The functions of class methods, which are bound anew each time."""
    return [getattr(owner, name).__func__ for owner, name in methods]


def _underlying(value: Any) -> Any:
    """The function of a property, static method or class method."""
    if isinstance(value, property):
        return value.fget
    return getattr(value, "__func__", value)
