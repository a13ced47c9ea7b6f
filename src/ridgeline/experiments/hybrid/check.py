"""Whether contenders compute the same: outputs of calls, and parameters after some training steps."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.experiments.hybrid.cases import HybridCase
from ridgeline.experiments.hybrid.entrant import Entrant, Inputs
from ridgeline.experiments.ways.contest import difference as results_difference
from ridgeline.tensors.nests import tensors_in

FIRST_CALLS = 3
FIRST_STEPS = 5
"""Within these a step is compiled and captured; they count as preparing it."""
CHECKED_STEPS = 8
"""Enough to meet replays after a capture; more would only amplify the last bit."""


class Seen(NamedTuple):
    """What a contender computed: outputs of all batches, or parameters after the checked steps."""

    tensors: list[Tensor]
    overwrites: bool


def begin(case: HybridCase, entrant: Entrant, batches: list[Inputs]) -> None:
    """The first calls, in which a program is compiled, captured and warmed up."""
    for index in range(FIRST_STEPS if case.purpose == "step" else FIRST_CALLS):
        entrant.run(batches[index % len(batches)])


def observe(case: HybridCase, entrant: Entrant, batches: list[Inputs]) -> Seen:
    """What a contender computes, after `begin`.

    Cost: Some calls or steps, and a copy of the outputs or parameters.
    """
    if case.purpose == "step":
        # From where `begin` stopped, so that all have taken the same steps.
        for index in range(FIRST_STEPS, CHECKED_STEPS):
            entrant.run(batches[index % len(batches)])
        return Seen([p.detach().clone() for p in entrant.model.parameters()], overwrites=False)
    # Cloned: a replayed graph writes the next outputs where these are.
    outputs = [t.clone() for batch in batches for t in tensors_in(_call(entrant, batch))]
    return Seen(outputs, _overwrites(entrant, batches))


def difference(case: HybridCase, seen: Seen, wanted: Seen) -> float:
    """From the eager program: of outputs over their largest value, of parameters over their change."""
    if case.purpose == "callable":
        return results_difference(seen.tensors, wanted.tensors)
    initial = [p.detach() for p in case.model_on_device().parameters()]
    # Over the change: beside weights that hardly move any difference would look small.
    change = distance(wanted.tensors, initial)
    return distance(seen.tensors, wanted.tensors) / (change or 1.0)


def _call(entrant: Entrant, batch: Inputs) -> Any:
    if entrant.load is not None:
        entrant.load(batch)
    return entrant.run(batch)


def _overwrites(entrant: Entrant, batches: list[Inputs]) -> bool:
    """Whether the output of one call is changed, or taken away, by the next."""
    kept = tensors_in(_call(entrant, batches[0]))
    copies = [tensor.clone() for tensor in kept]
    _call(entrant, batches[1])
    try:
        return not all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    except RuntimeError:  # CUDA graph trees refuse the access to a tensor that was overwritten
        return True


def distance(first: list[Tensor], second: list[Tensor]) -> float:
    """Euclidean, in double precision."""
    pairs = zip(first, second, strict=True)
    return sum(float((a - b).double().square().sum()) for a, b in pairs) ** 0.5
