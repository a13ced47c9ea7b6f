"""The experiment `overlap`: a loader that takes a wanted time, and who hides it."""

from functools import partial

import pytest
import torch
from rows import row_of

from ridgeline.experiments.overlap import CASES, batches, cases
from ridgeline.experiments.overlap.loading import SortedBatches, rounds_for
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import hold


def test_batches() -> None:
    """A batch is the same for the same index, of the wanted shape, and another for another index."""
    data = SortedBatches(3, (2, 4), rounds=2)
    first, second, third = data
    assert first.shape == (2, 4)
    assert torch.equal(data.load(1), second)
    assert not torch.equal(second, third)


def test_rounds_follow_the_seconds() -> None:
    """A loader of the wanted share takes about as long as wanted; at least one round is left."""
    step = partial(SortedBatches(1, (1,), 40).load, 0)
    assert rounds_for(0.0, step) == 1
    assert 10 < rounds_for(1.0, step) < 160


def test_steps() -> None:
    """A step uses the batch: another batch has another mean."""
    step = batches.Steps(8, 2, "cpu")
    means = step.over([torch.zeros(8, 8), torch.ones(8, 8), torch.zeros(8, 8)])
    assert means[0] == means[2] != means[1]


def test_batches_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded before, in a worker process or by the feed, the steps see the same batches in the same order."""
    monkeypatch.setattr(batches, "SIDE", 32)
    case = Case(
        name="batches",
        title="tiny",
        prepare=lambda: batches._host_contest(4),
        threads=1,
        calls=1,
        hides=True,
    )
    result = hold(case, limit_s=0.5, progress=lambda line: None)
    assert [(row.name, row.reason) for row in result.rows if row.status != "measured"] == []
    assert {row.difference for row in result.rows if row.kind != "part"} == {0.0}
    assert result.limit is not None
    assert row_of(result, "ridgeline feed").notes[0].startswith("feed on cpu: 4 batches")
    assert all(0.0 <= row.hidden <= 1.0 for row in result.rows if row.kind != "part")


def test_cases() -> None:
    """The cases are the same on CPU and GPU; results of a CPU are on the host already."""
    for device in ("cpu", "cuda"):
        assert tuple(case.name for case in cases(device, True)) == CASES
    lacking = {case.name: case.lacking for case in cases("cpu", False) if case.lacking}
    assert lacking == {"results": "needs a CUDA device: on a CPU results are on the host"}
    assert not any(case.lacking for case in cases("cuda", False))
