"""What workers that are slowed unevenly make of a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ridgeline.probe.rates.overlap import (
    OverlapRound,
    computing_slowdowns,
    rounds_of,
    transfer_slowdowns,
)

ROUNDS = [OverlapRound(slow, 2.0 * slow, 1e-3) for slow in (1.0, 2.5, 0.25)]


def beside(device: str) -> Any:
    """A worker whose only peer measured 3.0, 1.5 and 2.0."""
    return SimpleNamespace(
        device=torch.device(device), gather=lambda mine: [list(mine), [3.0, 1.5, 2.0]]
    )


def test_on_a_cpu_the_slowest_worker_of_each_round_counts() -> None:
    """All wait for it, whoever it is."""
    assert computing_slowdowns(ROUNDS, beside("cpu")) == [3.0, 2.5, 2.0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_transfers_all_workers_count_and_nobody_is_faster_than_alone(device: str) -> None:
    """So it is with kernels on GPUs."""
    assert transfer_slowdowns(ROUNDS, beside(device)) == [2.0, 5.0, 1.0, 3.0, 1.5, 2.0]
    assert computing_slowdowns(ROUNDS, beside("cuda")) == [1.0, 2.5, 1.0, 3.0, 1.5, 2.0]


def test_a_round_before_the_others_warms_up() -> None:
    """It is not among them."""
    taken = iter([OverlapRound(9.0, 9.0, 9.0), *ROUNDS])
    assert rounds_of(lambda: next(taken), 3) == ROUNDS
