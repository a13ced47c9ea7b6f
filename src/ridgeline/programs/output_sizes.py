"""Sizes in the Python modules that torch's compiler writes: numbers, or names that stand for numbers.

A program whose sizes may vary, or whose operators take the state of a generator (checkpoints with dropout),
has names for some: `s20 = state_size[0]` behind `state_size = state.size()`.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ridgeline.compiled_program import Shape

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


class Sizes:
    """What names stand for, as far as a module says it before it runs.

    Attributes:
        shapes: Of tensors, by their names.
    """

    def __init__(self) -> None:
        self.shapes: dict[str, Shape] = {}
        self._numbers: dict[str, int] = {}

    def note(self, name: str, value: ast.expr) -> None:
        """Remember what an assignment gives a name, where that is a number or the sizes of a tensor."""
        called = value.func if isinstance(value, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "size":
            if isinstance(called.value, ast.Name) and called.value.id in self.shapes:
                self.shapes[name] = self.shapes[called.value.id]
        elif self.is_known(value):
            self._numbers[name] = self.number(value)

    def is_known(self, node: ast.expr) -> bool:
        """Whether an expression is a number, or a tuple of numbers, that can be told."""
        if isinstance(node, ast.Tuple | ast.List):
            return all(map(self.is_known, node.elts))
        try:
            self.number(node)
        except (ValueError, LookupError, ZeroDivisionError):
            return False
        return True

    def number(self, node: ast.expr) -> int:
        """The number that an expression stands for.

        Raises:
            ValueError: it is known only when the program runs.
        """
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in self._numbers:
            return self._numbers[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self.number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.number(node.left), self.number(node.right))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            return self.shapes[node.value.id][self.number(node.slice)]
        raise ValueError(f"wanted a size that is known before it runs, got {ast.unparse(node)}")

    def shape(self, node: ast.expr) -> Shape:
        """The sizes that a tuple stands for.

        Raises:
            ValueError: it is none, or one of them is known only when the program runs.
        """
        if not isinstance(node, ast.Tuple | ast.List):
            raise ValueError(f"wanted a tuple of sizes, got {ast.unparse(node)}")
        return tuple(map(self.number, node.elts))
