"""What a program takes and gives, as text beside its operators: equal texts are equal programs.

A value that a program gives on as it got it (a number among its arguments, an attribute) is no part of its
graph, and torch's compiler does not compare it: its code fetches it anew in each call. A captured program has
it for good.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.side_effects import AttributeMutationNew
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable

from ridgeline.programs.distinct_results import memory_number
from ridgeline.tensors.copies import is_noted

UNKNOWN = object()
_PLAIN = (bool, int, float, str)


def inputs_of(placeholders: Iterable[fx.Node]) -> list[Any]:
    """Shapes, dtypes and devices of what a graph takes, which operators and results need not show."""
    values = [node.meta.get("example_value") for node in placeholders]
    return [(v.shape, v.dtype, v.device) for v in values if isinstance(v, torch.Tensor)]


class Results(NamedTuple):
    """What a program gives.

    Attributes:
        described: Shapes, strides and dtypes of tensors, whose memory they lie in, and constants.
        passed_through: Where the program gets the tensors that it gives as they are; its graph need not have
            them.
    """

    described: list[Any]
    passed_through: list[Any]


def results_of(graph: fx.GraphModule) -> Results:
    """What a program gives that the compiler is about to end with this graph.

    Constants are compared from then on: guards are added for those that have none.
    """
    output = next(iter(reversed(graph.graph.nodes)))
    nodes, passed_through, constants = [*output.all_input_nodes], list[Any](), list[str]()

    def add(variable: Any) -> None:
        # A graph does not give what the program gives as it got it: that is on the compiler's stack only.
        if isinstance(variable, TensorVariable) and variable.as_proxy().node.op == "placeholder":
            nodes.append(variable.as_proxy().node)
            passed_through.append(variable.source)
        constants.extend(_described(variable))

    translator = InstructionTranslator.current_tx()
    VariableTracker.visit(add, translator.stack)
    for variable, attributes in translator.output.side_effects.store_attr_mutations.items():
        if isinstance(variable.mutation_type, AttributeMutationNew):  # made, and maybe given
            VariableTracker.visit(add, [*attributes.values()])
    placeholders = graph.graph.find_nodes(op="placeholder")
    arguments = [memory_number(node.meta.get("example_value")) for node in placeholders]
    values = [node.meta.get("example_value") for node in nodes]
    tensors = [
        (v.shape, v.stride(), v.dtype, is_noted(v), [m == memory_number(v) for m in arguments])
        for v in values
        if isinstance(v, torch.Tensor)
    ]
    return Results(
        [*tensors, *constants], [source for source in passed_through if source is not None]
    )


def constant_of(value: Any) -> Any:
    """What is assigned, where that is a constant: what is there already is no change."""
    try:
        return value.as_python_constant() if value.is_python_constant() else UNKNOWN
    except (NotImplementedError, AttributeError):
        return UNKNOWN


def value_of(variable: Any) -> Any:
    """The tensor without data that a variable stands for; None where that is no tensor, or was not looked at.

    Code that assigns what an operator in place gave (`self.count += 1`) assigns the tensor that was there.
    """
    if type.__instancecheck__(LazyVariableTracker, variable) and not variable.is_realized():
        return None
    return variable.as_proxy().node.meta.get("example_value") if variable.is_tensor() else None


def _described(variable: Any) -> list[str]:
    """What a part of a result is, if no tensor; a number or text is looked at, and so guarded."""
    if type.__instancecheck__(LazyVariableTracker, variable):
        # Torch has looked at all else that a program gives.
        if not (variable.is_realized() or type(variable.original_value()) in _PLAIN):
            return []
        variable = variable.realize()
    if isinstance(variable, ConstantVariable):
        return [f"{type(variable.value).__name__} {variable.value!r}"]
    if isinstance(variable, ConstDictVariable):
        return [repr([constant_of(getattr(key, "vt", key)) for key in variable.items])]
    return [type(variable).__name__]
