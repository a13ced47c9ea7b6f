"""The seconds given for a choice: tracing, measuring and a remembered plan keep to them, too."""

import datetime
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, profiling
from ridgeline.decision.memory import recalling, remembered
from ridgeline.errors import OutOfTimeError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.planner.trials import trial_steps
from ridgeline.probe.measure import Known
from ridgeline.tracing.capture import trace
from strategies import make_machine

BATCH = torch.ones(8, 3, 8, 8)
OLD = "2020-01-01T00:00:00+00:00"


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host whose profile is known and young; nothing is compiled on it."""
    threads = torch.get_num_threads()
    setting = rl.machine.Setting(device="cpu", workers=1, threads=threads)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    machine = msgspec.structs.replace(make_machine(settings=[setting]), measured_at=now)
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", lambda: Known(machine, tmp_path))
    monkeypatch.setattr(profiling, "measure", lambda **_: machine)
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: 0.0)
    monkeypatch.setattr(trial_steps, "MOST_STEPS", trial_steps.LEAST_STEPS)
    right = choice.choose

    def eager(*arguments: Any, **more: Any) -> Ranking:
        return right(*arguments, **{**more, "fixed": {**more["fixed"], "execution": "eager"}})

    monkeypatch.setattr(choice, "choose", eager)
    return machine


def start(lines: list[str], **more: Any) -> rl.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rl.TrainStep(model, loss_fn, optimizer, device="cpu", progress=lines.append, **more)
    step.prepare(BATCH)
    return step


def test_without_time_to_trace_the_step_runs_as_written(
    machine: Machine, lines: list[str], clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is measured or tried; a note says so, and reports are made later, when asked for."""
    monkeypatch.setattr(profiling, "measure", lambda **_: pytest.fail("measured"))
    monkeypatch.setattr(choice, "run_trial", lambda *_: pytest.fail("tried"))
    clock.tick_s = 0.3
    note = (
        "the step runs as it was written, since there was no time to choose: wanted the step traced within "
        "1.00 s, got no result; allow more seconds"
    )
    with start(lines, seconds=1.0) as step:
        assert step.ranking is None
        assert step.workload is None
        assert step.plan == Plan(threads=torch.get_num_threads())
        assert lines == [note]
        assert note in step.notes
        assert math.isfinite(float(step(BATCH)))
        step.machine = machine
        assert step.predicted().step_ns > 0


def test_further_formats_are_traced_in_half_the_seconds(
    machine: Machine, lines: list[str], clock: Any, tmp_path: Path
) -> None:
    """Without them the choice goes on."""

    def run(tick_s: float) -> tuple[str, ...]:
        for path in tmp_path.glob("choice-*.json"):
            path.unlink()
        clock.now_s, clock.tick_s = 0.0, tick_s
        with start(lines, seconds=1000.0) as step:
            assert step.workload is not None
            assert step.ranking is not None
            formats = tuple(load.memory_format for load in step.workload.variants)
            late = "not traced in every precision and memory format: wanted the step traced within 500 s"
            assert any(note.startswith(late) for note in step.workload.notes) is not bool(formats)
            return formats

    assert run(1e-3) == ("channels_last",)
    checks = []
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    trace(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), 0.1),
        BATCH,
        memory_formats=("channels_last",),
        check=checks.append,
    )
    assert run(600.0 / len(checks)) == ()


@pytest.mark.parametrize("is_late", [False, True])
def test_measuring_has_a_limit(
    is_late: bool, machine: Machine, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share of the seconds; without seconds none."""
    limits: list[float] = []

    def measured(*, limit_s: float, **_: Any) -> Machine:
        limits.append(limit_s)
        return machine

    monkeypatch.setattr(profiling, "measure", measured)
    start(lines, seconds=100.0 if is_late else None).close()
    share = profiling.MOST_MEASURING_SHARE
    assert limits == [pytest.approx(100.0 * share) if is_late else math.inf]


def test_a_stale_profile_is_not_measured_again_without_time(
    machine: Machine, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That would take as long as measuring all of it for the first time; what it has stays."""
    refreshed: list[bool] = []
    old = msgspec.structs.replace(machine, measured_at=OLD)
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, refresh, **__: 1e3 * refresh)
    monkeypatch.setattr(profiling, "measure", lambda **how: refreshed.append(how["refresh"]) or old)
    with start(lines, seconds=100.0) as step:
        assert refreshed == [False]
        assert any(line.endswith(": measuring again") for line in lines)
        (kept,) = [line for line in lines if line.startswith("not measured again: ")]
        assert kept.startswith("not measured again: that takes about 1000 s, for which ")
        assert kept.endswith(
            " s of the 100 s of the choice may be used; the rates of that profile are kept"
        )
        assert kept in step.notes
        assert step.machine is not None
        assert not any("assumed" in warning for warning in step.machine.warnings)


def _out_of_time(*_: Any) -> Any:
    raise OutOfTimeError("time is up")


def test_a_plain_plan_is_remembered_without_a_trial(
    machine: Machine, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no time for one; and said."""
    start(lines).close()
    monkeypatch.setattr(choice, "run_trial", _out_of_time)
    lines.clear()
    with start(lines, seconds=1.0) as second:
        assert lines[1:] == ["there is no time to try it (time is up): taken as remembered"]
        assert second.ranking is not None
        assert second.ranking.notes[0] == (
            "chosen by an earlier start on this machine for the same step, and not tried again, since there "
            "was no time; reasons name what was measured then"
        )


def test_a_compiled_plan_is_not_remembered_without_a_trial(
    machine: Machine, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile in the first step, when the seconds are over; and what is remembered stays."""
    start(lines).close()
    (path,) = tmp_path.glob("choice-*.json")
    kept = remembered.Remembered.load(path).ranking
    first = kept.candidates[0]
    compiled = msgspec.structs.replace(first, plan=Plan(execution="compiled"))
    remembered.Remembered(
        ranking=msgspec.structs.replace(kept, candidates=(compiled, *kept.candidates[1:]))
    ).save(path)
    before = path.read_bytes()
    monkeypatch.setattr(choice, "run_trial", _out_of_time)
    lines.clear()
    with start(lines, seconds=50.0) as second:
        assert "it was not ready in time (time is up): choosing again" in lines
        assert second.plan.execution == "eager"
    assert [*tmp_path.glob("choice-*.json")] == [path], "what nobody tried is not remembered"
    assert path.read_bytes() == before


def test_who_gives_more_seconds_gets_a_choice_of_its_own(
    machine: Machine, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was chosen at leisure serves everybody; what was chosen in a hurry others in a hurry."""
    calls: list[Ranking] = []
    right = choice.choose
    monkeypatch.setattr(recalling, "AS_REMEMBERED", math.inf)

    def counted(*arguments: Any, **more: Any) -> Ranking:
        calls.append(right(*arguments, **more))
        return calls[-1]

    monkeypatch.setattr(choice, "choose", counted)
    for seconds, num_choices in ((30.0, 1), (31.0, 1), (300.0, 2), (None, 3), (70.0, 3)):
        start(lines, seconds=seconds).close()
        assert len(calls) == num_choices


@pytest.mark.parametrize("number", range(0, 40, 3))
def test_a_trace_that_is_ended_leaves_nothing(number: int) -> None:
    """Whichever operator is the last: no mode, no hook, no fake tensor, and the step runs."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.Adam(model.parameters())
    rest = number

    def check(is_variant: bool) -> None:
        nonlocal rest
        rest -= 1
        if rest < 0:
            raise OutOfTimeError("time is up")

    with pytest.raises(OutOfTimeError, match="time is up"):
        trace(model, loss_fn, optimizer, BATCH, may_run=True, check=check)
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
    loss_fn(model, BATCH).backward()
    optimizer.step()


def test_a_recorded_step_checks_its_time_too() -> None:
    """One that looks at values is run and recorded; before each run there is a check."""
    model = nn.Linear(4, 2)
    runs: list[int] = []

    def looks(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        runs.append(1)
        return loss * (2.0 if float(loss.detach()) > 1e9 else 1.0)

    def check(is_variant: bool) -> None:
        if len(runs) > 0:
            raise OutOfTimeError("time is up")

    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with pytest.raises(OutOfTimeError):
        trace(model, looks, optimizer, torch.ones(8, 4), may_run=True, check=check)
    assert torch.equal(model.weight, before)
    assert sum(runs) <= 2
