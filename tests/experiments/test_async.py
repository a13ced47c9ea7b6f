"""The experiment `async`: the law of a queue, what a task costs, and what a queue holds."""

import pytest

from ridgeline.experiments.asynchronous import cost, device_queue, host_queue, memory, run
from ridgeline.experiments.asynchronous.host_queue import COMPUTE, ISSUE, RETURN, explain, law
from ridgeline.experiments.ways.case import Case, Contest
from ridgeline.experiments.ways.contest import hold
from ridgeline.experiments.ways.result import WayCase


def held(contest: Contest) -> WayCase:
    """The contest without further ado; every way of it runs for which everything is there."""
    case = Case(name="tiny", title="tiny", prepare=lambda: contest, threads=1, calls=1)
    result = hold(case, limit_s=1.0, progress=lambda line: None)
    assert [(row.name, row.reason) for row in result.rows if row.status == "failed"] == []
    return result


def test_law() -> None:
    """N (t1 + t2 + t3) one by one, t1 + N t2 + t3 queued; a slow front end sets the pace itself."""
    assert law(10_000, 1.0, 2.0, 3.0) == (60_000.0, 20_004.0)
    assert law(10_000, 2.0, 1.0, 3.0) == (60_000.0, 20_004.0)
    assert law(1, 1.0, 2.0, 3.0) == (6.0, 6.0)


def test_law_beside_the_measurement() -> None:
    """The first way is set against the first formula, the fastest of ours against the second."""
    seconds = {"one by one": 6.5, "pool": 1.0, "ridgeline a": 3.0, "ridgeline b": 2.5}
    parts = {ISSUE: 1.0, COMPUTE: 2.0, RETURN: 3.0}
    assert list(explain(10, seconds | parts)) == [
        "N (t1 + t2 + t3) says 6.00 s, measured 6.50 s",
        "t1 + N t2 + t3 says 2.40 s, measured 2.50 s",
    ]
    assert len(explain(10, {"one by one": 6.5} | parts)) == 1


def test_queue_on_the_host() -> None:
    """Queued through a thread or the engine, the chain gives exactly the result of one by one."""
    result = held(host_queue._contest(num=host_queue.BATCH + 2))
    assert [row.kind for row in result.rows] == [
        "sequential", "peer", "ridgeline", "ridgeline", "ridgeline", "part", "part", "part",
    ]  # fmt: skip
    assert {row.difference for row in result.rows if row.kind != "part"} == {0.0}
    assert result.limit is not None
    assert len(result.notes) == 2


def test_queue_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written for GPUs gives the same result in every way; here on the CPU, where nothing is queued."""
    monkeypatch.setattr(device_queue, "SIDE", 16)
    result = held(device_queue._contest(num=2 * device_queue.BATCH, device="cpu"))
    assert [row.kind for row in result.rows] == ["sequential", "peer", "peer", "ridgeline"]
    assert {row.difference for row in result.rows} == {0.0}
    assert [note[:2] for note in result.notes] == ["t1", "N ", "t1"]
    assert result.limit is not None


def test_tasks() -> None:
    """Every way runs all tasks, whatever they write."""
    result = held(cost._contest(num=200))
    assert result.rows[0].name == "concurrent.futures"
    assert len(result.rows) == 5
    assert {row.name for row in result.rows if row.status == "skipped"} <= {"dask, threaded"}


def test_memory() -> None:
    """All items are consumed; bounded by bytes or by mini-batches, so many are alive and no more."""
    result = held(memory._contest(num=24))
    assert {row.difference for row in result.rows if row.kind != "part"} == {0.0}
    peak = {row.name: row.peak_bytes for row in result.rows if row.kind != "part"}
    item = memory.ITEM_BYTES
    assert peak["one by one"] <= 2 * item  # one is made while the last one's name still holds it
    # Beside what is pending there are the item just made, and one that its thread is letting go of.
    assert peak["ridgeline engine, at most 2 MiB"] <= memory.BOUND_BYTES + 2 * item
    assert peak["ridgeline engine, batches of 4"] <= ((2 + 1) * memory.BATCH + 1) * item
    assert peak["concurrent.futures, unbounded"] >= 2 * item


def test_items_are_counted_until_they_die() -> None:
    """An item counts as long as anybody holds it."""
    items = memory.Items(2)
    first = items.produce(0)
    second = items.produce(1)
    assert items.peak_bytes == 2 * memory.ITEM_BYTES
    del first, second
    kept = [items.produce(index) for index in range(2)]
    assert items.peak_bytes == len(kept) * memory.ITEM_BYTES


@pytest.mark.parametrize("quick", [True, False])
def test_one_case_of_the_experiment(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`only` takes cases by name; figures are per task."""
    monkeypatch.setattr(cost, "TASKS", {True: 50, False: 100})
    experiment = run(quick=quick, only=("task",), limit_s=0.5, device="cpu")
    (case,) = experiment.cases
    assert (experiment.name, case.name, case.unit) == ("async", "task", "task")
    assert f"{50 if quick else 100} tasks" in case.title
