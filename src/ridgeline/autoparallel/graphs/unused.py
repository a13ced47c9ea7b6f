"""Backward where some results are not used: what hangs on these alone gets no gradient, as from autograd."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ridgeline.autoparallel.graphs.aliasing import Memory
from ridgeline.autoparallel.graphs.program import Program


def run_partly(
    program: Program, saved: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The results of a backward program, where tangents that are None belong to results that nobody used.

    Nothing is computed of these alone: zero times infinity is no zero, and an optimizer leaves out what has
    no gradient, but not what has one of zeros.
    """
    with torch.no_grad():
        found: list[Tensor | None] = _Partly(program, len(tangents)).run(
            *program.state.values(), *saved, *tangents
        )
    return found


class _Partly(fx.Interpreter):
    """A program that is linear in its last inputs, operator by operator.

    None stands for what would be zeros: an operator that is linear in nothing else does not run.
    """

    def __init__(self, program: Program, num_linear: int) -> None:
        super().__init__(program.graph)
        places = [node for node in program.graph.graph.nodes if node.op == "placeholder"]
        self._linear = set(places[len(places) - num_linear :])
        self._accesses = program.accesses
        # What such an operator wrote into is linear, too, under whatever name it is read.
        self._written: set[Memory] = set()

    def run_node(self, n: fx.Node) -> Any:
        """The value of a node; None where it would be zeros."""
        linear = [value for value in n.all_input_nodes if self._is_linear(value)]
        if n.op != "call_function" or not linear:
            return super().run_node(n)
        self._linear.add(n)
        missing = [value for value in linear if self.env[value] is None]
        if len(missing) == len(linear):
            return None
        self._written |= self._accesses.written(n)
        # A sum, or what else puts several together.
        self.env |= {value: _zeros(value.meta["val"]) for value in missing}
        result = super().run_node(n)
        self.env |= dict.fromkeys(missing)
        return result

    def _is_linear(self, value: fx.Node) -> bool:
        return value in self._linear or not self._written.isdisjoint(self._accesses.of(value))


def _zeros(like: Tensor) -> Tensor:
    place = {"dtype": like.dtype, "device": like.device}
    return torch.empty_strided(like.shape, like.stride(), **place).zero_()
