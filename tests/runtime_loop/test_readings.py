"""Readings: every loss once, in windows that follow the clock; and trials that run as a run does."""

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ridgeline.plan import Plan
from ridgeline.programs.compiling import CompiledForms
from ridgeline.recording.recorder import WINDOW
from ridgeline.runtime.training import plan_trial, readings
from ridgeline.runtime.training.readings import MOST_STEPS, WINDOW_STEPS, LossReader
from ridgeline.tasks import load_task
from ridgeline.workers.blackbox import BlackBox
from ridgeline.workers.world import World

ALONE = World(0, 1, 0, torch.device("cpu"))


def windows(step_s: float, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(first step, steps) of the windows of a run whose steps take so long."""
    clock = itertools.count()
    now = SimpleNamespace(perf_counter=lambda: next(clock) * step_s)
    monkeypatch.setattr(readings, "time", now)
    reader = LossReader(ALONE)
    found, losses = [], []
    for step in range(steps):
        reader.add(torch.tensor(float(step)))
        # One look at the clock a step: of the windows' two, the first is taken when it begins.
        if reader.is_full:
            for window in reader.take(wants_stop=False):
                found.append((window.first_step, len(window.means)))
                losses += window.means
        elif reader._count > 1:
            next(clock)
    for window in reader.drain(wants_stop=False):
        found.append((window.first_step, len(window.means)))
        losses += window.means
    assert losses == [float(step) for step in range(steps)]
    return found


@pytest.mark.parametrize(
    ("step_s", "size"),
    [(1.0, WINDOW_STEPS), (1e-3, 100), (1e-6, MOST_STEPS)],
)
def test_windows_follow_a_rhythm_in_time(
    step_s: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long steps are read every tenth, short ones about ten times a second; no loss is left out."""
    found = windows(step_s, 4 * size, monkeypatch)
    assert found[0] == (1, WINDOW_STEPS)
    assert abs(found[1][1] - size) <= 0.2 * size
    for (first, count), (following, _) in itertools.pairwise(found):
        assert following == first + count


def test_a_bad_loss_is_found_in_its_place() -> None:
    """Also in a window that is not full."""
    reader = LossReader(ALONE)
    reader.start(41)
    for value in (1.0, float("nan"), 2.0):
        reader.add(torch.tensor(value))
    (window,) = reader.drain(wants_stop=True)
    assert (window.first_step, window.first_bad, window.num_stops) == (41, 1, 1)
    assert reader.drain(wants_stop=False) == []


def test_short_steps_are_tried_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the recorder keeps; long ones by the least number, warm-up aside."""
    task = load_task("mlp", data_dir=None, batch_size=64)
    for seconds, steps in ((1e9, WINDOW), (0.0, plan_trial.TRIAL_STEPS)):
        monkeypatch.setattr(plan_trial, "TRIAL_S", seconds)
        measured = plan_trial.try_plan(task, Plan(threads=1), ALONE, seed=0)
        assert len(measured.steps_ns) == steps
        assert {"input", "forward", "backward", "optimizer"} <= {s.name for s in measured.frames}


def test_a_trial_that_compiles_tells_what_was_made() -> None:
    """Forward and backward, for the planner to read."""
    task = load_task("mlp", data_dir=None, batch_size=64)
    measured = plan_trial.try_plan(task, Plan(execution="compiled", threads=1), ALONE, seed=0)
    assert [program.phase for program in measured.programs] == ["forward", "backward"]


def test_compiling_in_a_trial_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker by worker, where several compile and none can be ended from outside."""
    limits: list[float] = []

    def made(*_: object, forms: CompiledForms, **__: object) -> None:
        limits.append(forms.limit_s)
        raise InterruptedError

    monkeypatch.setattr(plan_trial, "PlannedStep", made)
    task = load_task("mlp", data_dir=None, batch_size=64)
    for more in ({}, {"compile_limit_s": 2.0}):
        with pytest.raises(InterruptedError):
            plan_trial.try_plan(task, Plan(execution="compiled"), ALONE, seed=0, **more)
    assert limits == [math.inf, 2.0]


def test_a_trial_that_fails_closes_its_black_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the step cannot be made, and where it fails; its directory is gone, too."""

    class Watched(BlackBox):
        """Tells whether it is closed."""

        def __init__(self, path: Path) -> None:
            super().__init__(path)
            self.path, self.closed = path, 0
            opened.append(self)

        def close(self) -> None:
            self.closed += 1
            super().close()

    opened: list[Watched] = []

    def fail(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(plan_trial, "BlackBox", Watched)
    task = dataclasses.replace(load_task("mlp", data_dir=None, batch_size=64), loss_fn=fail)
    with pytest.raises(InterruptedError):
        plan_trial.try_plan(task, Plan(threads=1), ALONE, seed=0)
    monkeypatch.setattr(plan_trial, "PlannedStep", fail)
    with pytest.raises(InterruptedError):
        plan_trial.try_plan(task, Plan(threads=1), ALONE, seed=0)
    assert [box.closed for box in opened] == [1, 1]
    assert not any(box.path.parent.exists() for box in opened)
