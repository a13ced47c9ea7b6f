"""Runs of operations as Python functions of their own: what a lane executes without looking anything up.

A segment is written as source text with one line an operator and compiled once. It takes values from the
environment of a call into local variables, drops each after its last use, and puts back what others read.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

Environment = list[Any]
"""The values of one call: slot `i` holds what node `i` of the graph gave, or None."""
Segment = Callable[[Environment], None]
"""Operations of one lane, in order: reads and writes slots of an environment."""


class SegmentSource(NamedTuple):
    """What a segment is written from.

    Attributes:
        nodes: What runs, in order; each once.
        slot_of: Slot of every node of the graph.
        exported: Slots that the segment fills in the environment.
        emptied: Slots of the environment that are not read after this segment.
        device: Where operators make tensors that were traced to make them on `home`; None: where traced.
        home: See `device`.
    """

    nodes: Sequence[fx.Node]
    slot_of: dict[fx.Node, int]
    exported: frozenset[int]
    emptied: frozenset[int]
    device: torch.device | None = None
    home: torch.device | None = None


def compile_segment(text: SegmentSource, name: str) -> Segment:
    """The function that the text describes; `name` appears in tracebacks."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    last: dict[fx.Node, int] = {}
    for position, node in enumerate(text.nodes):
        last[node] = position
        for argument in node.all_input_nodes:
            last[argument] = position
    known: set[fx.Node] = set()
    for position, node in enumerate(text.nodes):
        for argument in node.all_input_nodes:
            if argument not in known:
                known.add(argument)
                slot = text.slot_of[argument]
                lines.append(f"t{slot} = v[{slot}]")
                if slot in text.emptied:
                    lines.append(f"v[{slot}] = None")
        known.add(node)
        slot = text.slot_of[node]
        lines.append(f"t{slot} = {_call(node, text, names)}")
        if slot in text.exported:
            lines.append(f"v[{slot}] = t{slot}")
        # Local variables would keep values until the function returns, and with that the peak of the memory.
        ended = [v for v in dict.fromkeys((*node.all_input_nodes, node)) if last[v] == position]
        lines += [f"t{text.slot_of[value]} = None" for value in ended]
    body = "\n    ".join(lines or ["pass"])
    exec(compile(f"def segment(v):\n    {body}\n", f"<{name}>", "exec"), names)
    return names["segment"]


def _call(node: fx.Node, text: SegmentSource, names: dict[str, Any]) -> str:
    """The call of a node's operator as source; what cannot be written goes into `names`."""
    if node.target is operator.getitem:
        value, index = node.args
        return f"{_argument(value, text, names)}[{_argument(index, text, names)}]"
    arguments = [_argument(argument, text, names) for argument in node.args]
    arguments += [
        f"{key}={_argument(argument, text, names)}" for key, argument in node.kwargs.items()
    ]
    target = node.target
    # The C function below an overload: one Python frame less in every call.
    function = target._op if isinstance(target, OpOverload) else target  # noqa: SLF001
    return f"{_constant(function, names, 'f')}({', '.join(arguments)})"


def _argument(value: Any, text: SegmentSource, names: dict[str, Any]) -> str:
    if isinstance(value, fx.Node):
        return f"t{text.slot_of[value]}"
    # Not floats: `repr` of an infinity or a NaN is a name that Python does not know.
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, Sequence) and _has_node(value):
        inner = ", ".join(_argument(item, text, names) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    if isinstance(value, torch.device) and text.device is not None and value == text.home:
        value = text.device
    return _constant(value, names, "c")


def _has_node(values: Sequence[Any]) -> bool:
    return any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves(values))


def _constant(value: Any, names: dict[str, Any], prefix: str) -> str:
    name = f"{prefix}{len(names)}"
    names[name] = value
    return name
