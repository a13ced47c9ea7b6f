"""Servers and workers that are killed with every type of message: nothing acknowledged is lost, nobody hangs."""

import argparse
from pathlib import Path
from typing import Any

import dying
import kills
import pytest

SEEDS = range(2)


@pytest.fixture(scope="module")
def processes() -> Any:
    """Made from a process that has imported all there is."""
    return kills.made_processes()


@pytest.fixture(autouse=True)
def usual_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of this process are quick, and share memory elsewhere, here alone."""
    monkeypatch.setattr(dying.connections, "Connection", dying.connections.Connection)
    monkeypatch.setattr(dying.segment, "SHARED_FILES", dying.segment.SHARED_FILES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", dying.TYPES)
def test_servers_that_are_killed(kind: str, seed: int, processes: Any, tmp_path: Path) -> None:
    """Two workers go on, and all that they pushed is in the values once."""
    kills.kill_server(kind, seed, processes, tmp_path)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", dying.TYPES)
def test_workers_that_are_killed(kind: str, seed: int, processes: Any, tmp_path: Path) -> None:
    """The other one goes on after a lease; the values hold what was acknowledged, and one push more at most."""
    kills.kill_worker(kind, seed, processes, tmp_path)


def test_outcomes_are_a_table() -> None:
    """A row for each seed and victim; what was not reached is not taken for what held."""
    wanted = argparse.Namespace(seeds=2, first=7, jobs=3)
    outcomes = [
        kills.Outcome(7, "server", "Push", 1.0, 0.5, ""),
        kills.Outcome(7, "worker", "Pull", 1.0, 2.25, "AssertionError"),
    ]
    told = kills.report(outcomes, 3.0, wanted)
    words = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    assert [(row["seed"], row["victim"]) for row in words] == [(7, "server"), (7, "worker")]
    assert (words[0]["Push"], words[0]["Pull"]) == ("held", "not run")
    assert (words[1]["Push"], words[1]["Pull"]) == ("not run", "failed")
    assert (told["killed"], told["wanted"], len(told["failed"])) == (2, 72, 1)
    assert told["longest_wait_s"] == {"server": 0.5, "worker": 2.25}
