"""A trial that costs the process its GPU ends the choice, and the next start does without that plan."""

from pathlib import Path

import pytest
import torch

from planned_candidates import make_candidate
from ridgeline.decision.memory.lost_device import raise_if_lost, refuse_if_lost
from ridgeline.errors import DeviceLostError, PlanError
from ridgeline.plan import Plan
from ridgeline.planner.trials.trial_loop import attempted
from ridgeline.timeline import Timeline

COMPILED = Plan(execution="compiled")
FAULT = RuntimeError("CUDA error: misaligned address\nand what torch adds to it")


def lose(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize() -> None:
        raise FAULT

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)


def test_the_next_start_does_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That plan alone, of that step alone, until somebody removes the file."""
    lose(monkeypatch)
    place = tmp_path, "step"
    refuse_if_lost(place, COMPILED)
    with pytest.raises(
        DeviceLostError,
        match="wanted a GPU that still works after a trial of 1 worker, compiled, got CUDA error: misaligned "
        "address; start the process again, which will leave out that plan",
    ):
        raise_if_lost(place, COMPILED, FAULT)
    with pytest.raises(
        PlanError, match=f"misaligned address; remove {tmp_path / 'lost-step.json'}"
    ):
        refuse_if_lost(place, COMPILED)
    refuse_if_lost(place, Plan(execution="compiled", precision="bf16"))
    refuse_if_lost((tmp_path, "another"), COMPILED)
    (tmp_path / "lost-step.json").unlink()
    refuse_if_lost(place, COMPILED)


def test_what_cannot_be_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message then names the plan that runs."""
    lose(monkeypatch)
    for place in (None, (tmp_path / "file" / "below", "step")):
        (tmp_path / "file").write_text("")
        with pytest.raises(DeviceLostError, match=r"start the process again with plan=rl.Plan\(\)"):
            raise_if_lost(place, COMPILED, FAULT)


def test_a_device_that_answers_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most failures of trials cost nothing."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    raise_if_lost((tmp_path, "step"), COMPILED, FAULT)
    assert not [*tmp_path.iterdir()]


def test_no_other_plan_is_tried_then() -> None:
    """It is no failure of one plan."""

    def trial(plan: Plan) -> Timeline:
        raise DeviceLostError("wanted a GPU that goes on", "a fault")

    candidates = [make_candidate("compiled", 1.0), make_candidate("eager", 2.0)]
    with pytest.raises(DeviceLostError):
        attempted(candidates[0], candidates, trial, {})
