"""Kills at every file operation: a resumed run gets through, ends bitwise as one never killed, and leaves nothing."""

from pathlib import Path

import killed_runs
import msgspec
import pytest
import torch
from killed_runs import Ending

from ridgeline.probe.groups.group import run_in_group
from ridgeline.workers.world import World

LEAST = 60
"""Operations of clearing away three remnants, writing a checkpoint and deleting another."""


def assert_all_end_well(endings: list[Ending]) -> None:
    assert [ending for ending in endings if ending.wrong or not ending.was_killed] == []
    assert len(endings) > LEAST
    calls = {ending.call.split()[0] for ending in endings}
    assert calls == {"mkdir", "create", "write", "close", "fsync", "replace", "rename", "unlink", "rmdir"}  # fmt: skip


def test_one_worker(tmp_path: Path) -> None:
    """Killed while remnants are cleared away, a checkpoint is written, and another deleted."""
    alone = World(0, 1, 0, torch.device("cpu"))
    assert_all_end_well(killed_runs.killed_everywhere(tmp_path, alone))


@pytest.mark.timeout(600)  # some hundred short runs of two processes
def test_two_workers(tmp_path: Path) -> None:
    """The same with a worker whose random numbers rank 0 keeps for it."""
    reply = run_in_group(
        "killed_runs:run", str(tmp_path).encode(), workers=2, threads=1, device="cpu"
    )
    assert_all_end_well(msgspec.json.decode(reply, type=list[Ending]))
