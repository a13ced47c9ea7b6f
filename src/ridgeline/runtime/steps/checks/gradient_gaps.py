"""How far the gradients of two steps are apart, parameter by parameter, as the optimizer's state holds them.

Of an update much may be rounding: Adam makes whole steps of single elements that are next to nothing. What an
optimizer averages are the gradients themselves, and of these only what is nothing but rounding as a whole
(the bias of attention's keys) is far from itself when it is rounded otherwise. So each is held to what
rounding and chance do to it alone.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ridgeline.runtime.steps.checks.relative_gaps import Compared, alignment, relative_gaps
from ridgeline.runtime.steps.checks.step_difference import (
    MOST_ALIGNED,
    MOST_LOSS,
    Ends,
    Outcome,
    begun_state,
    loss_gap,
)

FEW = 32
"""Elements below which one draw of rounding says little of the next."""

MOST_ROUNDED = 0.3
"""A gradient that rounding or chance alone moves by more is not judged."""


class GradientLimit(NamedTuple):
    """How far a gradient may be from the reference.

    Attributes:
        floor: As a part of what a step changes in the state, whatever rounding does.
        factor: Or this multiple of what rounding and chance have been seen to do to it.
    """

    floor: float
    factor: float


EXACT, ROUNDED = GradientLimit(0.03, 4.0), GradientLimit(0.1, 4.0)
"""In single precision, and where a plan computes in fewer bits. Kernels that add in another order stay below
1e-3, and 16 bits keep 2e-3 of a number, of which sums over many keep less: the gradients of BERT, GPT-2,
ViT-B/16 and ResNet-50 in bfloat16 are 0.004 to 0.4 from those in single precision.

In single precision what is beyond the first and has no direction is held to the second: a ReLU next to zero
is on in one run and off in another. Source: DenseNet-121 on a CPU, 0.031 of a gradient of 128 elements."""
FEW_LIMIT = GradientLimit(0.3, 12.0)
"""Of a tensor of few elements, for either."""


class Moves(NamedTuple):
    """What rounding and chance have been seen to do at most.

    Attributes:
        gaps: To what `gradient_gaps` compares.
        loss: To the loss, relative.
    """

    gaps: list[float]
    loss: float = 0.0

    def joined(self, ends: Ends) -> "Moves":
        """With what they did between two more outcomes."""
        loss = max(self.loss, loss_gap(ends.wanted, ends.got))
        return Moves([*map(max, self.gaps, gradient_gaps(ends))], loss)


def gradient_gaps(ends: Ends) -> list[float]:
    """For each tensor of the optimizer's state, or each parameter without any, the gap over its change.

    State that the step made began as nothing. NaN never: infinite where one is no number, or has no
    counterpart.
    """
    kept = zip(ends.wanted.state, ends.got.state, strict=True)
    if any(len(a) != len(b) for a, b in kept):
        return [math.inf] * len(_compared(ends.wanted))
    # A NaN compares as neither larger nor smaller, so it would pass every limit: it counts as infinite.
    gaps = relative_gaps(_triples(ends))
    return [math.inf if math.isnan(gap) else gap for gap in gaps]


def are_directed(ends: Ends, found: Sequence[float], seen: Moves, limit: GradientLimit) -> bool:
    """Whether a gradient beyond its limit leans to one side, as what is wrong does.

    Where the last layer saturates, or normalises few numbers, rounding makes all gradients larger or smaller
    at once, and moves the loss: what it has been seen to do is not beyond.

    Args:
        ends: Of both ways.
        found: What `gradient_gaps` gives for them.
        seen: Of steps that were rounded otherwise.
        limit: Of tensors that have many elements.
    """
    most = max(MOST_LOSS, limit.factor * seen.loss)
    if loss_gap(ends.wanted, ends.got) > most or not all(map(math.isfinite, found)):
        return True
    ratios = _ratios(found, seen, ends.wanted, limit)
    triples = zip(_triples(ends), ratios, strict=True)
    return any(ratio > 1.0 and alignment(one) > MOST_ALIGNED for one, ratio in triples)


def settled(
    ends: Ends,
    chances: Iterator[Ends],
    limit: GradientLimit,
    largest: Callable[[float], float],
) -> tuple[float, int, GradientLimit]:
    """Gradients beside one run after another that rounding and chance make different, until none is beyond.

    Args:
        ends: Of both ways.
        chances: Of such runs.
        limit: Of tensors that have many elements.
        largest: Of all workers, which continue together.

    Returns:
        What `worst` gives, and the limit that held: single precision is held loosely where nothing beyond its
        limit leans to one side.
    """
    found = gradient_gaps(ends)
    seen = Moves([0.0] * len(found))
    # `largest` asks all workers, so that they decide alike: the further runs hold collectives.
    while largest((judged := worst(found, seen, ends.wanted, limit))[0]) > 1.0:
        if limit is EXACT and not largest(are_directed(ends, found, seen, limit)):
            limit = ROUNDED
        elif (three := next(chances, None)) is not None:
            seen = seen.joined(three)
        else:
            break
    return *judged, limit


def _triples(ends: Ends) -> list[Compared]:
    three = _begun(ends), _compared(ends.wanted), _compared(ends.got)
    return [Compared(*tensors) for tensors in zip(*three, strict=True)]


def _limit(tensor: Tensor, limit: GradientLimit) -> GradientLimit:
    return FEW_LIMIT if tensor.numel() < FEW else limit


def worst(
    found: Sequence[float], seen: Moves, outcome: Outcome, limit: GradientLimit
) -> tuple[float, int]:
    """The largest gap in units of what it may be, and the number of its parameter.

    Args:
        found: What `gradient_gaps` gives of the step in question.
        seen: Of steps that were rounded otherwise.
        outcome: Whose tensors these are.
        limit: Of tensors that have many elements.
    """
    # Without state, the parameter itself stands for its gradient; the order is that of `_compared`.
    owners = [index for index, state in enumerate(outcome.state) for _ in state or [None]]
    ratios = _ratios(found, seen, outcome, limit)
    largest = max(range(len(ratios)), key=ratios.__getitem__, default=None)
    return (0.0, 0) if largest is None else (ratios[largest], owners[largest])


def _ratios(
    found: Sequence[float], seen: Moves, outcome: Outcome, limit: GradientLimit
) -> list[float]:
    """Gaps in units of what they may be; for the arguments see `worst`."""
    ratios = []
    for gap, known, tensor in zip(found, seen.gaps, _compared(outcome), strict=True):
        floor, factor = _limit(tensor, limit)
        if math.isinf(gap):
            ratios.append(math.inf)
        else:
            # What chance alone moves so far says nothing, except that nothing infinite comes of chance.
            ratios.append(gap / max(floor, factor * known) if known <= MOST_ROUNDED else 0.0)
    return ratios


def _compared(outcome: Outcome) -> list[Tensor]:
    pairs = zip(outcome.parameters, outcome.state, strict=True)
    return [tensor for parameter, state in pairs for tensor in state or [parameter]]


def _begun(ends: Ends) -> list[Tensor]:
    """What each compared tensor was before the step: zero where the step made the optimizer's state."""
    triples = zip(ends.before.parameters, ends.before.state, ends.wanted.state, strict=True)
    return [
        tensor
        for parameter, state, made in triples
        for tensor in begun_state(state, made) or [parameter]
    ]
