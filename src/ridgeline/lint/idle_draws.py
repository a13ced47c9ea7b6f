"""Random numbers that a step draws on the host and that decide nothing.

Libraries draw one for each layer and compare it with the probability of leaving the layer out: with a
probability of zero it comes out alike whatever is drawn. A graph may hold such a step; its replays draw the
numbers, too, so that the host's generator is where the step as written leaves it.

Source: `layerdrop` of transformers (Whisper, BART, OPT, wav2vec 2.0 and others).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.lint.lint_judge import CalledOperator
from ridgeline.programs.distinct_results import memory_number

_LEAST = 1e-30
"""Limits that are nearer to zero are zero in single precision."""
_COMPARISONS: dict[str, Callable[[float], bool]] = {
    "aten.lt": lambda limit: limit <= 0.0 or limit >= 1.0,
    "aten.le": lambda limit: limit < -_LEAST or limit >= 1.0,
    "aten.gt": lambda limit: limit < -_LEAST or limit >= 1.0,
    "aten.ge": lambda limit: limit <= 0.0 or limit >= 1.0,
}
"""Comparisons of a number in [0, 1) with a limit, and which limits decide them beforehand."""
_ANSWERS: dict[str, Callable[[float, float], bool]] = {
    "aten.lt": operator.lt,
    "aten.le": operator.le,
    "aten.gt": operator.gt,
    "aten.ge": operator.ge,
}
_ANY_DRAW = 0.5
_SAME = ("aten.detach", "aten.alias")
"""What autograd makes of a tensor in between."""


def decided(name: str, limit: Any) -> bool | None:
    """What a comparison of a number in [0, 1) with this limit gives; None where the number counts.

    Args:
        name: The operator, `aten.lt` for `number < limit`.
        limit: None is decided but for numbers.
    """
    if name not in _COMPARISONS or not isinstance(limit, int | float):
        return None
    return _ANSWERS[name](_ANY_DRAW, limit) if _COMPARISONS[name](float(limit)) else None


class IdleDraw(NamedTuple):
    """One call of `torch.rand` on the host."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def repeat(self) -> None:
        """Draw as many numbers; about 2 us."""
        torch.rand(self.shape, dtype=self.dtype, device="cpu")


class IdleDraws:
    """The draws of one watched run, as long as nothing but such comparisons reads them.

    Attributes:
        refuted: Notified of the line of each draw that decides something.
    """

    def __init__(self, refuted: Callable[[str], None]) -> None:
        self.refuted = refuted
        self._draws: dict[int | None, tuple[Tensor, IdleDraw, str]] = {}

    @property
    def draws(self) -> tuple[IdleDraw, ...]:
        """In the order in which they were made."""
        return tuple(draw for _, draw, _ in self._draws.values())

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a tensor is such a draw."""
        return any(memory_number(tensor) in self._draws for tensor in tensors)

    def take(self, operation: CalledOperator, line: Callable[[], str]) -> bool:
        """Whether an operator is such a draw, or a comparison of one that decides nothing."""
        if _is_draw(operation):
            tensor = operation.outputs[0]
            draw = IdleDraw(tuple(tensor.shape), tensor.dtype)
            # The tensor is kept, so that its memory stays its own.
            self._draws[memory_number(tensor)] = (tensor, draw, line())
            return True
        read = dict.fromkeys(map(memory_number, operation.inputs)).keys() & self._draws.keys()
        if not read:
            return False
        # Checked as it runs, since the same draw may decide nothing here and something in the next line.
        if operation.name in _SAME or _is_decided(operation):
            return True
        for memory in read:
            self.refuted(self._draws.pop(memory)[2])
        return False


def _is_draw(operation: CalledOperator) -> bool:
    outputs = operation.outputs
    return (
        operation.name == "aten.rand"
        and operation.device != "cpu"
        and len(outputs) == 1
        and outputs[0].device.type == "cpu"
        and outputs[0].numel() == 1
        and operation.kwargs.get("generator") is None
    )


def _is_decided(operation: CalledOperator) -> bool:
    limit = operation.args[1] if len(operation.args) == 2 else None
    return decided(operation.name, limit) is not None
