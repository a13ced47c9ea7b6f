"""The experiment `kvstore`: every way works in the same, and a wrong name is refused."""

import pytest

from ridgeline.cli.bench import EXPERIMENTS
from ridgeline.errors import TaskError
from ridgeline.experiments import kvstore
from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.ways.text import experiment_text
from ridgeline.reporting.text import as_text


def test_every_way_computes_the_same() -> None:
    """Of all workers, and of one worker and a server; Ray is named as what is lacking."""
    found = kvstore.run(quick=True, only=("64KiB", "server-64KiB"), limit_s=2.0)
    ways = [[row.way for row in case.rows if row.status == "measured"] for case in found.cases]
    assert ways == [
        ["gloo all_reduce", "ridgeline dist_sync", "ridgeline dist_async"],
        ["gloo messages", "ridgeline dist_async"],
    ]
    for case in found.cases:
        for row in case.rows:
            assert row.status == "measured"
            assert row.difference is None or row.difference < 1e-6
    assert "actors of Ray are not compared" in as_text(experiment_text(found))


def test_names_are_those_of_the_command_line() -> None:
    """Nothing else may be asked for."""
    assert EXPERIMENTS["kvstore"].parts == CASES
    with pytest.raises(TaskError, match="2GiB"):
        kvstore.run(only=("2GiB",))
    with pytest.raises(
        TaskError, match=r"^wanted device 'cpu' for the experiment kvstore, got 'cuda'; l"
    ):
        kvstore.run(device="cuda")


def test_more_servers_and_a_slow_worker() -> None:
    """One server and two give the same values; training reaches the same accuracy in both ways."""
    found = kvstore.run(quick=True, only=("shards-rprop", "straggler"), limit_s=2.0)
    shards, straggler = found.cases
    assert [row.way for row in shards.rows] == [
        "ridgeline dist_async, 1 server",
        "ridgeline dist_async, 2 servers",
    ]
    assert [row.way for row in straggler.rows] == ["ridgeline dist_sync", "ridgeline dist_async"]
    for row in (*shards.rows, *straggler.rows):
        assert (row.status, row.difference) == ("measured", 0.0)
    for row in straggler.rows:
        assert float(row.notes[0].split("%")[0]) >= 95.0
