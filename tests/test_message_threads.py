"""Only threads that carry messages are calmed, and only those that have the ordinary policy."""

import os
import sys
from pathlib import Path

import pytest

from ridgeline.host import message_threads
from ridgeline.host.message_threads import calm_message_threads

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="wants the policies of Linux"
)


class Policies:
    """Stands in for the system's: threads with names and policies, of which some refuse or end."""

    def __init__(self, directory: Path, names: dict[int, str], policies: dict[int, int]) -> None:
        self.policies, self.refusing = policies, set[int]()
        for thread, name in names.items():
            (directory / str(thread)).mkdir()
            (directory / str(thread) / "comm").write_text(f"{name}\n")

    def get(self, thread: int) -> int:
        if thread not in self.policies:
            raise ProcessLookupError(thread)
        return self.policies[thread]

    def set(self, thread: int, policy: int, _: object) -> None:
        if thread in self.refusing:
            raise PermissionError(thread)
        self.policies[thread] = policy


def test_only_message_threads_of_the_ordinary_policy_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again changes nothing; a sandbox that forbids it, or a thread that ended, is no failure."""
    loop = "gloo_tcp_loop"
    names = {1: "python", 2: loop, 3: loop, 4: loop, 5: loop}
    before = {1: os.SCHED_OTHER, 2: os.SCHED_OTHER, 3: os.SCHED_FIFO, 4: os.SCHED_OTHER}
    system = Policies(tmp_path, names, dict(before))
    system.refusing = {4}
    monkeypatch.setattr(message_threads, "_THREADS", tmp_path)
    monkeypatch.setattr(os, "sched_getscheduler", system.get)
    monkeypatch.setattr(os, "sched_setscheduler", system.set)
    for _ in range(2):
        assert calm_message_threads() == 1
        assert system.policies == {**before, 2: os.SCHED_BATCH}


def test_elsewhere_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without /proc there is nothing to change."""
    monkeypatch.setattr(message_threads, "_THREADS", tmp_path / "absent")
    assert calm_message_threads() == 0
