"""Runs of many programs: shared out over children and GPUs, told as JSON, also where one is ended early."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from adversary import run
from adversary.findings import Findings
from adversary.judging import Verdict
from adversary.program import Program

made: list[StandIn] = []


class StandIn:
    """In place of a child process: refuses `last` programs, all children together, and asks to be ended then."""

    last = 5
    num_run = 0
    lock = threading.Lock()
    all_counted = threading.Event()

    def __init__(self, _limit_s: float, **options: Any) -> None:
        self.options, self.killed = options, threading.Event()
        made.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def examine(self, program: Program, mode: str, *, shrinks: bool) -> tuple[Verdict, Program]:
        """`shrinks` is what the run was asked for."""
        assert shrinks
        with self.lock:
            StandIn.num_run += 1
            number = StandIn.num_run
        if number <= self.last:
            return Verdict(mode, "refused", detail=f"wanted {number}, got /a/file"), program
        if number == self.last + 1:
            self.all_counted.wait()
            os.kill(os.getpid(), signal.SIGTERM)
        self.killed.wait()
        return Verdict(mode, "failed", "crashes"), program

    def kill(self) -> None:
        self.killed.set()


class Counting(Findings):
    """Says when those that were refused are counted: later than they are answered for."""

    def add(self, verdict: Verdict, program: Program, seed: int) -> bool:
        """As ever."""
        is_first = super().add(verdict, program, seed)
        if self.finished.total() == StandIn.last:
            StandIn.all_counted.set()
        return is_first


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No child processes, and the usual end of this one."""
    monkeypatch.setattr(run, "Child", StandIn)
    monkeypatch.setattr(run, "Findings", Counting)
    monkeypatch.setattr(StandIn, "num_run", 0)
    StandIn.all_counted.clear()
    made.clear()
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    file = tmp_path / "counts.json"
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--out", f"{tmp_path}", "--json", f"{file}", *words]
    )
    assert run.main() == 0
    return json.loads(file.read_text())


def test_what_is_known_is_written_where_a_run_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What children were killed over is no finding; a program counts when all its modes were run."""
    words = (
        "--programs",
        "90",
        "--seed",
        "7",
        "--jobs",
        "3",
        "--modes",
        "call:eager",
        "call:script",
    )
    counts = told(tmp_path, monkeypatch, *words)
    assert (counts["wanted"], counts["runs"], counts["failed"]) == (180, 5, 0)
    assert sum(one["refused"] for one in counts["modes"].values()) == 5
    assert counts["seeds"] == [7, 90]
    assert 0 < counts["seeds_in_all_modes"] < 3
    assert {name for kind in counts["refusals"].values() for name in kind} == {"wanted N, got FILE"}


def test_children_take_programs_and_gpus_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many modes there are for as many children: none is left with the dearest mode alone."""
    monkeypatch.setattr(StandIn, "last", 1000)
    counts = told(tmp_path, monkeypatch, "--device", "cuda", "--gpus", "0", "3", "--jobs", "4")
    assert counts["runs"] == counts["wanted"] == 900
    assert counts["seeds_in_all_modes"] == 100
    assert [child.options["gpu"] for child in made] == ["0", "0", "3", "3", "0", "0", "3", "3"]
