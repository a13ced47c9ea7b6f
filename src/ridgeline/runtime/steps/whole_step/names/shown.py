"""Tensors under names, which a program returns besides the loss: attributes, entries, variables of closures.

After each run they are put where the step as written puts them, in containers of their own. What autograd
knows of them in a plain loop, it does not know here: a backward pass through one says so.
"""

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import CaptureError


class Name(NamedTuple):
    """What a step puts under one name.

    Attributes:
        put: Puts another object there.
        value: What stands there, with tensors without data in it.
        known: What of it was there before the step, by number.
    """

    put: Callable[[Any], object]
    value: Any
    known: Mapping[int, Any]


class Result(NamedTuple):
    """A tensor under a name.

    Attributes:
        number: Of the tensor that stands for it in `Name.value`.
        has_graph: Whether the step as written leaves it with the graph that computed it.
        place: Among the batch's tensors; None where the program returns it.
    """

    number: int
    has_graph: bool
    place: int | None


class Shown(NamedTuple):
    """What is to be put under names after each run of a program.

    Attributes:
        names: Where.
        results: What; those that the program returns in its order.
    """

    names: tuple[Name, ...] = ()
    results: tuple[Result, ...] = ()

    def put(self, returned: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Put tensors under their names.

        Args:
            returned: By the program, behind the loss: new tensors.
            inputs: The batch's.

        Cost: A microsecond a name; ten a tensor that has had a graph.
        """
        computed, now = iter(returned), dict[int, Any]()
        for number, has_graph, place in self.results:
            tensor = next(computed) if place is None else inputs[place]
            now[number] = _with_graph(tensor) if has_graph else tensor
        for put, value, known in self.names:
            if isinstance(value, Tensor):
                put(now[id(value)])
            else:  # a dictionary each time, into which `copy.deepcopy` puts what it makes
                put(copy.deepcopy(value, {**known, **now}))


class Carried(NamedTuple):
    """A tensor that a step reads, and puts another one for: a hidden state.

    Attributes:
        target: From where the program reads it.
        example: What the step found when it was traced.
    """

    target: Tensor
    example: "weakref.ref[Tensor]"


class _Gone(torch.autograd.Function):
    """Stands for the graph that computed a tensor, which stayed inside of a program."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, tensor: Tensor) -> Tensor:  # type: ignore[override]
        # The very tensor, so that a script may write into it as into any that was computed.
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise CaptureError(
            "wanted a backward pass within the step, got one from a tensor that a step kept, whose graph "
            "stayed inside of the step's one program; add it to the loss, or use execution='compiled' or "
            "'eager'"
        )


def _with_graph(tensor: Tensor) -> Tensor:
    with torch.enable_grad():
        return _Gone.apply(torch.empty(0, device="cpu", requires_grad=True), tensor)
