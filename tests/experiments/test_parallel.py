"""The experiment `parallel`: work, the pieces that a person would split it into, and who runs them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from rows import row_of

from ridgeline.experiments.parallel import CASES, cases, gpus, threads
from ridgeline.experiments.parallel.work import (
    NAME,
    Work,
    branches,
    cell,
    chains,
    independent,
    perceptron_step,
    squares_on,
)
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import difference, hold, observed

WORKS: dict[str, Callable[[], Work]] = {
    "devices": partial(chains, 16, 20),
    "operators": partial(independent, "cpu", 24, 8),
    "small": partial(independent, "cpu", 8, 12),
    "branches": partial(branches, "cpu", 6, 8),
    "cell": partial(cell, "cpu", 6, 4),
    "perceptron": partial(perceptron_step, ("cpu", "cpu"), 8, 16),
}


@pytest.mark.parametrize("work", [*WORKS.values(), partial(squares_on, ("cpu", "cpu"), 8, 3)])
def test_pieces_make_the_whole(work: Callable[[], Work]) -> None:
    """What is joined from the pieces is what the function as written returns, and it is finite."""
    made = work()
    whole = observed(made.fn(*made.inputs))
    assert len(whole) >= 1
    assert all(result.isfinite().all() for result in whole)
    assert difference(observed(made.join([piece() for piece in made.pieces])), whole) == 0.0
    assert len(made.pieces) >= 2


def test_perceptron_gradients() -> None:
    """The step of figure 12.3.1, written out, is gradient descent on the mean squared error of both halves."""
    work = perceptron_step(("cpu", "cpu"), 4, 8)
    x0, x1, w1, w2, *_ = work.inputs
    a, b = w1.clone().requires_grad_(), w2.clone().requires_grad_()
    # Both halves see the same weights at the start.
    loss = sum(((torch.tanh(x @ a) @ b - x).square().sum() / (2 * len(x))) for x in (x0, x1))
    loss.backward()
    updated = work.fn(*work.inputs)
    torch.testing.assert_close(updated[0], w1 - 0.1 * a.grad)
    torch.testing.assert_close(updated[1], w2 - 0.1 * b.grad)
    assert torch.equal(updated[2], updated[0])
    assert torch.equal(updated[3], updated[1])


@pytest.mark.parametrize("name", list(WORKS))
def test_ways_on_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a pool, by TorchScript and by ours, results are those of one thread; the limit is below them."""
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    case = Case(
        name=name,
        title=name,
        prepare=lambda: threads._contest(name, WORKS[name]),
        threads=1,
        calls=1,
    )
    result = hold(case, limit_s=0.5, progress=lambda line: None)
    assert [(row.name, row.reason) for row in result.rows if row.status != "measured"] == []
    gaps = {row.name: row.difference for row in result.rows if row.kind != "part"}
    # Threads inside an operator may add in another order.
    assert max(gaps.values()) < 1e-5
    assert gaps["ThreadPoolExecutor by hand"] == 0.0
    assert gaps[NAME] < 1e-6
    assert result.limit is not None
    assert row_of(result, NAME).notes[0].startswith("chose ")


def test_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one core the ways that need two are left out with the reason."""
    monkeypatch.setattr(threads, "num_cores", lambda: 1)
    contest = threads._contest("devices", WORKS["devices"])
    assert {way.lacking for way in contest.ways[1:-1]} == {"needs two cores"}


def test_cases() -> None:
    """The cases are the same on CPU and GPU; what a machine lacks is said."""
    for device in ("cpu", "cuda"):
        assert tuple(case.name for case in cases(device, True)) == CASES
    lacking = {case.name: case.lacking for case in cases("cpu", True) if case.lacking}
    assert lacking == {"host-and-device": "needs a CUDA device"}
    if torch.cuda.device_count() < 2:
        lacking = {case.name: case.lacking for case in cases("cuda", True) if case.lacking}
        assert lacking == dict.fromkeys(("devices", "perceptron"), "needs two CUDA devices")


def test_two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for two GPUs runs on the CPU twice, with the same results and the slower part of a turn as limit."""
    monkeypatch.setattr(gpus, "TWO", ("cpu:0", "cpu:1"))
    contest = gpus._over_devices(squares_on(("cpu", "cpu"), 16, 3))
    case = Case(name="devices", title="tiny", prepare=lambda: contest, threads=1, calls=1)
    result = hold(case, limit_s=0.5, progress=lambda line: None)
    assert [(row.name, row.reason) for row in result.rows if row.status != "measured"] == []
    assert max(row.difference or 0.0 for row in result.rows) == 0.0
    alone = [row_of(result, f"cpu:{index} alone").seconds for index in range(2)]
    assert result.limit is not None
    assert result.limit.seconds >= max(one.value for one in alone if one is not None)
