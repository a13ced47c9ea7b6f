"""Signs of life: a line where nothing was said for ten seconds, and a thread that ends with its context."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, heartbeat, profiling
from ridgeline.decision.heartbeat import EVERY_S, Heartbeat
from ridgeline.probe.groups.group import Group
from ridgeline.probe.measure import Known
from strategies import make_machine


class Clock:
    """Stands where the test puts it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_is_due_after_ten_seconds_of_silence() -> None:
    """With what is under way and for how long; any other line puts it off.

    An expectation that has not come true is not repeated.
    """
    clock, lines = Clock(), list[str]()
    beats = Heartbeat(lines.append, clock=clock)
    with beats.during("compiling", 38.0):
        clock.now_s = 4.0
        assert beats.beat() == EVERY_S - 4.0
        clock.now_s = 10.0
        assert beats.beat() == EVERY_S
        clock.now_s = 18.0
        beats.spoke()
        clock.now_s = 20.0
        assert beats.beat() == EVERY_S - 2.0
        clock.now_s = 28.0
        with beats.during("waiting"):
            clock.now_s = 30.0
            beats.beat()
        clock.now_s = 40.0
        beats.beat()
    assert lines == [
        "  still compiling (10.0 s so far, about 38.0 s expected)",
        "  still waiting (2.00 s so far)",
        "  still compiling (40.0 s so far, longer than the 38.0 s expected)",
    ]
    clock.now_s = 90.0
    assert beats.beat() == EVERY_S
    assert len(lines) == 3, "nothing is under way"


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_thread_ends_with_its_context(error: type[BaseException] | None) -> None:
    """However that ends; and what was told before is told again."""
    beats = Heartbeat(lambda line: None)

    def work() -> None:
        with beats, beats.during("working"):
            assert any(t.name == "ridgeline-heartbeat" for t in threading.enumerate())
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    assert not any(t.name == "ridgeline-heartbeat" for t in threading.enumerate())
    assert beats._work is None


def test_nobody_is_told_nothing() -> None:
    """No thread is started for it."""
    before = {*threading.enumerate()}
    with Heartbeat(None):
        assert {*threading.enumerate()} <= before


def test_a_line_that_fails_stops_the_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way goes on."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    told = threading.Event()

    def say(line: str) -> None:
        told.set()
        raise ValueError(line)

    with Heartbeat(say) as beats, beats.during("working"):
        assert told.wait(30.0)
        assert beats._thread is not None
        beats._thread.join(30.0)
        assert not beats._thread.is_alive()


def test_a_second_context_has_signs_of_life_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice that is made again in the midst of training is as long as the first."""
    monkeypatch.setattr(heartbeat, "EVERY_S", 0.0)
    told = threading.Event()
    beats = Heartbeat(lambda line: told.set())
    with beats:
        pass
    with beats, beats.during("working"):
        assert told.wait(30.0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_choice_says_what_is_under_way(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing, measuring and each trial, on rank 0 only."""
    threads = torch.get_num_threads()
    machine = make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=threads)])
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", lambda: Known(machine, tmp_path))
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: 6.0)
    monkeypatch.setattr(Group, "age_s", 0.0)
    lines: list[str] = []
    beats: list[Heartbeat] = []

    class Watched(Heartbeat):
        def __init__(self, say: Any) -> None:
            super().__init__(say, clock=Clock())
            beats.append(self)

    def beat() -> None:
        beats[-1]._spoken_s = -EVERY_S
        beats[-1].beat()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        beat()
        return model(batch).square().mean()

    monkeypatch.setattr(choice, "Heartbeat", Watched)
    monkeypatch.setattr(profiling, "measure", lambda **_: beat() or machine)
    monkeypatch.setattr(choice, "run_trial", lambda *_: beat() or pytest.fail("stop here"))
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with rl.TrainStep(model, loss_fn, optimizer, device="cpu", progress=lines.append) as made:
        made.world = dataclasses.replace(made.world, rank=rank)
        with pytest.raises(pytest.fail.Exception):
            made.prepare(torch.ones(8, 4))
    still = {line for line in lines if line.startswith("  still")}
    expected = {
        "  still tracing the step (0 s so far)",
        "  still measuring (0 s so far, about 6.00 s expected)",
        "  still timing a step (0 s so far)",
        "  still trying it (0 s so far)",
    }
    assert still == (expected if rank == 0 else set())
