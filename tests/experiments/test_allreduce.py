"""The experiment `allreduce`: every exact algorithm that is offered, and the bandwidth of the bus."""

import pytest

from printed import as_text
from ridgeline.errors import TaskError
from ridgeline.experiments import allreduce
from ridgeline.experiments.allreduce.sweep import CASES, SIZES
from ridgeline.experiments.ways.result import WayExperiment
from ridgeline.experiments.ways.text import experiment_text
from ridgeline.synchronisation import ALGORITHMS, offered

WORKERS = 3
CHOSEN = ("1KiB", "256KiB", "256MiB")


@pytest.fixture(scope="module")
def told() -> list[str]:
    """What was said meanwhile."""
    return []


@pytest.fixture(scope="module")
def found(told: list[str]) -> WayExperiment:
    """Three workers over gloo: a number that is no power of two is scaled and settled."""
    return allreduce.run(
        quick=True, only=CHOSEN, limit_s=3.0, device="cpu", workers=WORKERS, progress=told.append
    )


def test_every_algorithm_is_there(found: WayExperiment) -> None:
    """Those that are offered for the device, exact and whole, after the backend's own; all compute the same."""
    entries = [ALGORITHMS[name] for name in offered("cpu")]
    ours = [
        f"ridgeline {entry.label}"
        for entry in entries
        if entry.is_exact and not (entry.shards_update or entry.replaces_update)
    ]
    assert ours
    for case in found.cases[:2]:
        assert [row.name for row in case.rows] == ["gloo all_reduce", *ours]
        for row in case.rows:
            if row.status == "skipped":
                continue
            assert (row.status, row.reason) == ("measured", "")
            assert row.difference is not None
            assert row.difference < 1e-6


def test_every_way_is_told_before_it_is_made(found: WayExperiment, told: list[str]) -> None:
    """So that somebody who waits sees what for; by one worker, not by all."""
    assert told[0] == f"allreduce: {WORKERS} workers on cpu, {len(CHOSEN)} cases"
    for case in found.cases[:2]:
        lines = [line for line in told if line.startswith(f"{case.name}: ")]
        ways = [f"{case.name}: {row.name}" for row in case.rows]
        assert lines == [*ways, f"{case.name}: taking turns"]


def test_the_bus_is_that_of_nccl_tests(found: WayExperiment) -> None:
    """2 (n - 1) / n times the bytes, over the time."""
    for case in found.cases[:2]:
        for row in case.rows:
            if row.seconds is not None:
                wanted = SIZES[case.name] * 2 * (WORKERS - 1) / WORKERS / row.seconds.value
                assert row.bus_bytes_per_s == pytest.approx(wanted)
    assert "Bus" in as_text(experiment_text(found))


def test_sizes_for_gpus_are_left_out(found: WayExperiment) -> None:
    assert [case.name for case in found.cases] == list(CHOSEN)
    assert [case.skipped for case in found.cases] == ["", "", "a size for GPUs"]


def test_an_algorithm_for_several_hosts_is_left_out_on_one() -> None:
    """With the reason, and not as one that failed."""
    found = allreduce.run(quick=True, only=("1KiB",), limit_s=1.0, device="cpu", workers=4)
    (case,) = found.cases
    (row,) = [row for row in case.rows if row.name == "ridgeline hierarchical"]
    assert (row.status, row.seconds) == ("skipped", None)
    assert "several hosts for sync.algorithm='hierarchical', got all 4 on one host" in row.reason


def test_an_unknown_size_is_refused() -> None:
    """Before any worker starts."""
    with pytest.raises(TaskError) as refused:
        allreduce.run(only=("2KiB",))
    assert str(refused.value) == (
        f"wanted cases out of {', '.join(CASES)}, got 2KiB for the experiment allreduce; name some of those"
    )
