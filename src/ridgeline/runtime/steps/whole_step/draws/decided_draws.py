"""Random numbers whose comparison is decided before they are drawn, as with a `layerdrop` of zero.

Libraries draw one for each layer and leave the layer out where it is below a probability. With a probability
of zero that is a branch on a value, and yet always the same branch: a program takes it, and draws the number.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ridgeline.lint.idle_draws import IdleDraw, decided
from ridgeline.runtime.steps.whole_step.draws.forked_draws import is_draw

_OPERATORS = {
    getattr(owner, name): f"aten.{name}"
    for owner in (Tensor, torch)
    for name in ("lt", "le", "gt", "ge")
}
"""Comparisons, also those that Python writes as `draw < limit` or `limit > draw`."""
_SINGLE = ((), (1,))
"""Shapes of one number."""


class DecidedDraws(TorchFunctionMode):
    """Inside a trace, a number that was just drawn and a limit that none reaches compare to a constant."""

    def __init__(self) -> None:
        super().__init__()
        # Kept, so that no later tensor has the number of one of them.
        self._drawn: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OPERATORS and len(args) == 2 and id(args[0]) in self._drawn:
            answer = decided(_OPERATORS[func], args[1])
            if answer is not None:
                # Made of a number, it is a constant of the trace, which code may branch on.
                return torch.tensor(answer if not args[0].dim() else [answer], device="cpu")
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and isinstance(result, FakeTensor) and result.shape in _SINGLE:
            self._drawn[id(result)] = result
        return result


def take_host_draws(graph: fx.GraphModule) -> tuple[IdleDraw, ...]:
    """Take draws on the host that nothing reads out of a GPU's graph, whose replays would not draw them."""
    found = []
    for node in list(graph.graph.nodes):
        if is_draw(node) and not node.users and node.meta["val"].device.type == "cpu":
            value = node.meta["val"]
            found.append(IdleDraw(tuple(value.shape), value.dtype))
            graph.graph.erase_node(node)
    graph.recompile()
    return tuple(found)
