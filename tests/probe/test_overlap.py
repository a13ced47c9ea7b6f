"""What workers that are slowed unevenly make of a step."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.machine import Overlap, Quantity, Setting
from ridgeline.probe.rates.overlap import (
    OverlapRound,
    computing_slowdowns,
    gains,
    rounds_of,
    seconds_of_call,
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


def test_the_gain_of_a_round_is_of_its_own_slowdowns() -> None:
    """One round favours computing and one communicating: neither gains, whatever medians of both say."""
    uneven, even = OverlapRound(1.25, 5.0, 1e-3), OverlapRound(5.0, 1.25, 1e-3)
    found = [uneven, even, OverlapRound(2.0, 2.0, 1e-3)]
    alike: Any = SimpleNamespace(device=torch.device("cpu"), gather=lambda mine: [mine, mine])
    compute_x, transfer_x = computing_slowdowns(found, alike), transfer_slowdowns(found, alike)
    assert gains(compute_x, transfer_x) == pytest.approx([1.0, 1.0, 1.0])


@given(st.floats(1.0, 100.0), st.floats(1.0, 100.0), st.floats(0.5, 2.0))
def test_slowdowns_add_up_to_the_gain(compute: float, sent: float, gain: float) -> None:
    """Where neither would then be faster than alone; without a gain they are as they were measured."""

    def number(value: float) -> Quantity:
        return Quantity.measured([value], "x")

    one = Setting(device="cpu", workers=2, threads=1)
    alone = Overlap(
        setting=one, compute_slowdown=number(compute), communication_slowdown=number(sent)
    )
    assert alone.slowdowns() == (compute, sent)
    together = msgspec.structs.replace(alone, gain=number(gain)).slowdowns()
    assert min(together) >= 1.0
    rate = sum(1.0 / slow for slow in together)
    assert rate == pytest.approx(gain) or (rate < gain and 1.0 in together)
    if 1.0 not in together:
        assert together[0] / together[1] == pytest.approx(compute / sent)


@pytest.mark.parametrize(("moments", "calls"), [([0.0, 5.0, 6.0], 1), ([0.0, 1.0, 2.0, 4.0], 2)])
def test_a_call_is_timed_whatever_passes_before_it(
    moments: list[float], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that others keep from the processor for longer than the window is; no further one begins after it."""
    left, done = iter(moments), list[int]()
    fake = SimpleNamespace(perf_counter=lambda: next(left))
    monkeypatch.setattr("ridgeline.probe.rates.overlap.time", fake)
    found = seconds_of_call(2.0, lambda: done.append(1))
    assert len(done) == calls
    assert found == moments[len(done) + 1] / calls


def test_a_round_before_the_others_warms_up() -> None:
    """It is not among them."""
    taken = iter([OverlapRound(9.0, 9.0, 9.0), *ROUNDS])
    assert rounds_of(lambda: next(taken), 3) == ROUNDS
