"""Steps that take gradients inside their loss: of a penalty, or of an equation for a network to fulfil."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables import TensorVariable

_CHECK = "_check_requires_grad_intermediate_outputs"
"""TorchDynamo (2.13) refuses a result that depends on a tensor which the program itself made require
gradients, since a compiled program would lose them. Nothing is compiled of a reading."""


@contextlib.contextmanager
def new_leaves_read() -> Iterator[None]:
    """Inside, a program may make tensors require gradients, and return what depends on them."""
    # By what a version has and not by its number, so that a release between the two is met as well.
    if hasattr(OutputGraph, _CHECK):
        with mock.patch.object(OutputGraph, _CHECK, return_value=None):
            yield
    else:
        with mock.patch.object(TensorVariable, "method_requires_grad_", _requires_grad_):
            yield


_as_in_torch: Any = TensorVariable.method_requires_grad_


def _requires_grad_(variable: Any, tx: Any, requires_grad: Any = True) -> Any:
    """What torch 2.11 lacks: a tensor that the program has made changes as it does when the program runs."""
    wanted = requires_grad if requires_grad is True else requires_grad.as_python_constant()
    example = variable.as_proxy().node.meta["example_value"]
    if variable.source is not None or example.requires_grad == wanted:
        return _as_in_torch(variable, tx, requires_grad)
    example.requires_grad_(wanted)
    variable.requires_grad = wanted
    return variable
