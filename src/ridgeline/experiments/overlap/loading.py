"""A loader that takes a wanted time for a batch, here or in a worker process; and the step it feeds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ridgeline.experiments.turns import take_turns, times_faster
from ridgeline.recording.turns import call_s

SORTED = 20_000
"""Values that one round of loading sorts: some hundred microseconds outside of Python's lock."""
FEW_ROUNDS, TURNS = 10, 9
"""Rounds that are timed at once, and how often, to learn what a round takes."""


class SortedBatches(IterableDataset[Tensor]):
    """`num` batches of `shape`, each made by sorting random values `rounds` times."""

    def __init__(self, num: int, shape: tuple[int, ...], rounds: int) -> None:
        super().__init__()
        self.num, self.shape, self.rounds = num, shape, rounds
        self._values = torch.rand(SORTED, generator=torch.Generator().manual_seed(0))

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.num):
            yield self.load(index)

    def load(self, index: int) -> Tensor:
        """One batch; the same for the same index."""
        seen = 0.0
        for _ in range(self.rounds):
            # Read, so that no sort can be left out.
            seen += float(self._values.sort().values[0])
        return torch.full(self.shape, seen + index)


def rounds_for(share: float, step: Callable[[], Any]) -> int:
    """Rounds of loading that take this share of a step's seconds, at least one.

    Args:
        share: Seconds of loading over those of a step.
        step: One step, which waits until it is done.

    Cost: Some steps, and about as long for sorting; in turns, so that a busy moment meets both.
    """
    few = SortedBatches(1, (1,), FEW_ROUNDS)
    samples = take_turns(
        {"step": partial(call_s, step), "load": partial(call_s, partial(few.load, 0))}, turns=TURNS
    )
    in_a_step = times_faster(samples, "step")["load"].value * FEW_ROUNDS
    return max(1, round(share * in_a_step))
