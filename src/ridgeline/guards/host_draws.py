"""Random numbers on the host, in programs whose draws are known to decide nothing; see `idle_draws`."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._dynamo.variables import ConstantVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

_ANY_DRAW = 0.5
_call = TorchInGraphFunctionVariable.call_function


@contextlib.contextmanager
def host_draws_read() -> Iterator[None]:
    """Inside, TorchDynamo takes `torch.rand([])` for a number, so that it can read what compares one.

    Nothing of such a reading runs; another use of the number than a comparison ends it.
    """

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        # Only the form in which libraries draw a number on the host: others may draw tensors that are used.
        is_draw = self.value is torch.rand and not kwargs and len(args) == 1
        if is_draw and torch.get_default_device().type == "cpu":
            return ConstantVariable.create(_ANY_DRAW)
        return _call(self, tx, args, kwargs)

    with mock.patch.object(TorchInGraphFunctionVariable, "call_function", call_function):
        yield
