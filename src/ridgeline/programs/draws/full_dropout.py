"""Dropout of everything (`p=1.0`, the end of some schedules), which draws nothing as it is written.

Torch's compiler (2.11 to 2.13) makes one operator of all dropout, which draws a mask on a CPU whatever the
share is: random numbers that follow would be others than those of the step as written.
"""

from typing import Any

import torch
from torch import fx
from torch.nn import functional

_NAMES = ("input", "p", "training", "inplace")
"""Arguments of `functional.dropout` that may be given by position."""


def drop_all_without_draws(module: fx.GraphModule) -> None:
    """Change a graph that TorchDynamo made so that dropout of everything is a product with zero.

    Source: torch/aten/src/ATen/native/Dropout.cpp, `_dropout_impl`.
    """
    changed = False
    for node in module.graph.find_nodes(op="call_function", target=functional.dropout):
        given = {**dict(zip(_NAMES, node.args, strict=False)), **node.kwargs}
        if given.get("p") == 1.0 and given.get("training", True) is True:
            node.target = torch.Tensor.mul_ if given.get("inplace") else torch.mul
            node.args = (given["input"], 0.0)
            node.kwargs = dict[str, Any]()
            changed = True
    if changed:
        module.recompile()
