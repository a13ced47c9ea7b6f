"""Servers and workers that are killed with every type of message: nothing acknowledged is lost, nobody hangs."""

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
    monkeypatch.setattr(dying.connections, "Channel", dying.connections.Channel)
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
