"""Steps that take gradients inside their loss: of a penalty, or of an equation for a network to fulfil."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from torch._dynamo.output_graph import OutputGraph

_CHECK = "_check_requires_grad_intermediate_outputs"
"""TorchDynamo refuses a result that depends on a tensor which the program itself made require gradients,
since a compiled program would lose them. Nothing is compiled of a reading. Torch 2.11 has no such check: it
cannot read these programs."""


@contextlib.contextmanager
def new_leaves_read() -> Iterator[None]:
    """Inside, a program may make tensors require gradients, and return what depends on them."""
    if not hasattr(OutputGraph, _CHECK):
        yield
        return
    with mock.patch.object(OutputGraph, _CHECK, return_value=None):
        yield
