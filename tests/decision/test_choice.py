"""The choice for a script's own step: progress, seconds, memory, and machines that cannot be measured."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, profiling
from ridgeline.decision.memory import compile_times, recalling
from ridgeline.errors import LaunchError, OutOfTimeError, PlanError
from ridgeline.machine import Machine
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.plan import Plan
from ridgeline.planner.assumed import with_assumed_rates
from ridgeline.planner.preparation import is_compiled
from ridgeline.probe.groups.group import Group
from ridgeline.probe.measure import Known
from strategies import make_machine


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host whose profile is known, with a cache of its own; takes the lines of progress."""
    threads = torch.get_num_threads()
    machine = make_machine(settings=[rl.machine.Setting(device="cpu", workers=1, threads=threads)])
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", lambda: Known(machine, tmp_path))
    monkeypatch.setattr(profiling, "measure", lambda **_: machine)
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: 20.0)
    return []


def start(lines: list[str], width: int = 2, **more: Any) -> rl.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rl.TrainStep(model, loss_fn, optimizer, device="cpu", progress=lines.append, **more)
    step.prepare(torch.ones(8, 4))
    return step


def test_the_second_start_tries_what_the_first_chose(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only that, without tracing; another step is chosen for anew."""
    monkeypatch.setattr(recalling, "AS_REMEMBERED", float("inf"))  # however busy the machine is
    with start(lines) as first:
        assert any(line.startswith("trying 1 worker") for line in lines)
    lines.clear()
    with start(lines) as second:
        assert second.plan.settings == first.plan.settings
        assert second.workload is None
        assert len(lines) == 2
        assert lines[0].endswith("which an earlier start chose for this step")
        assert "chosen by an earlier start on this machine" in second.ranking.notes[0]
        assert second.expected().step_ns == second.ranking.best.measured.step_ns
    lines.clear()
    with start(lines, width=3):
        assert not any("earlier start" in line for line in lines)


def test_the_second_start_reads_no_programs(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take a second or more of a large network, and predict only what is not tried then."""
    monkeypatch.setattr(recalling, "AS_REMEMBERED", float("inf"))
    asked: list[bool] = []
    right = choice.run_trial

    def run_trial(*arguments: Any) -> Any:
        asked.append(any(isinstance(one, ProgramWatch) for one in arguments))
        return right(*arguments)

    monkeypatch.setattr(choice, "run_trial", run_trial)
    start(lines).close()
    assert asked
    assert all(asked)
    asked.clear()
    start(lines).close()
    assert asked == [False]


def test_a_remembered_plan_that_fails_is_forgotten(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And chosen anew, with the reason."""
    start(lines).close()
    lines.clear()
    right = choice.run_trial
    calls: list[int] = []

    def fails_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise PlanError("not today")
        return right(*arguments)

    monkeypatch.setattr(choice, "run_trial", fails_once)
    start(lines).close()
    assert "it fails now (not today): choosing again" in lines
    assert len(calls) > 1


@pytest.mark.parametrize(("now_ns", "is_kept"), [(1_250_000, True), (1_260_000, False)])
def test_a_remembered_plan_that_became_slow_is_chosen_anew(
    now_ns: int, is_kept: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slower than it was by more than a quarter; both times are told."""
    step_ns, right = [1_000_000], choice.run_trial

    def lasting(*arguments: Any) -> Any:
        return msgspec.structs.replace(right(*arguments), steps_ns=(step_ns[0],) * 8)

    monkeypatch.setattr(choice, "run_trial", lasting)
    start(lines).close()
    lines.clear()
    step_ns[0] = now_ns
    start(lines).close()
    told = [line for line in lines if line.endswith("where it took 1.00 ms: choosing again")]
    assert len(told) == (0 if is_kept else 1)
    assert (len(lines) == 2) is is_kept


@pytest.mark.parametrize("allow", [(), ("compression",)])
def test_encoding_is_timed_where_it_is_allowed(
    allow: tuple[str, ...], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes seconds, in which nothing is learned of plans that send gradients as they are."""
    asked: list[bool] = []
    known = profiling.measure()

    def measure(*_: Any, codecs: bool, **__: Any) -> Any:
        asked.append(codecs)
        return known

    def missing_seconds(*_: Any, codecs: bool, **__: Any) -> float:
        asked.append(codecs)
        return 0.0

    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(profiling, "missing_seconds", missing_seconds)
    with start(lines, allow=allow):
        assert asked
        assert {*asked} == {bool(allow)}


@pytest.mark.parametrize(
    ("needed_s", "begins", "ends"),
    [
        (10.0, "operators were not timed: ", "they are priced by general rates of this machine"),
        (11.0, "not measured: ", "rates that were not measured are assumed"),
    ],
)
def test_few_seconds_leave_the_operators_untimed(
    needed_s: float,
    begins: str,
    ends: str,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """General rates are enough then, or assumed ones, and that is the first warning of the profile."""
    asked: list[int] = []
    monkeypatch.setattr(profiling, "measure", lambda **_: asked.append(1) or make_machine())
    monkeypatch.setattr(Group, "age_s", 4.0)  # of which the processes' start is shorter
    monkeypatch.setattr(profiling, "seconds_here", lambda *_: needed_s)
    with start(lines, seconds=30.0) as step:
        assert not asked
        assert step.machine is not None
        assert step.machine.warnings[0] == (
            f"{begins}that takes about 16.0 s, for which 10.5 s of the 30.0 s of the choice may be used; {ends}"
        )
        assert any("s left)" in line for line in lines)
        assert step.machine.warnings[0] in step.notes


def test_what_was_not_timed_is_in_the_notes(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What measuring had to leave out is not for the profile alone; rates that are missing are assumed."""
    left_out = "operators of model were not timed: a reason"
    found = msgspec.structs.replace(make_machine(), ceilings=(), warnings=(left_out,))
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: 0.0)
    monkeypatch.setattr(profiling, "measure", lambda **_: found)
    with start(lines) as step:
        assert left_out in step.notes
        assert any(
            "were not timed on this machine: predictions" in note for note in step.ranking.notes
        )


def test_compiling_is_announced_with_its_seconds(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each form that is compiled, before it is; what compiles nothing says nothing."""
    right = choice.run_trial

    def eagerly(make: Any, plan: rl.Plan, *rest: Any) -> Any:
        return right(make, msgspec.structs.replace(plan, execution="eager"), *rest)

    monkeypatch.setattr(choice, "run_trial", eagerly)
    start(lines, seconds=1000.0).close()
    tried = [line for line in lines if line.startswith("trying")]
    compiled = [line for line in tried if ", compiling it first for about " in line]
    assert any(", compiled" in line for line in compiled)
    assert all("s left)" in line for line in tried)
    assert not any(", eager" in line for line in compiled)
    assert len(compiled) == len({line.split(", ")[1] for line in compiled})


def test_a_machine_that_cannot_be_measured_is_no_reason_to_stop(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trials decide, and the reason is told, in one line."""

    def fails(**_: Any) -> Machine:
        raise LaunchError("a worker\n  died")

    monkeypatch.setattr(profiling, "measure", fails)
    with start(lines) as step:
        assert step.ranking.best.measured is not None
    assert lines[0] == "the machine could not be measured (a worker died); rates are assumed"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("workers", [1, 2])
def test_assumed_rates_serve_every_prediction(device: str, workers: int) -> None:
    """Nothing that was measured is replaced, and every other number says that it is assumed."""
    setting = rl.machine.Setting(
        device=device, workers=workers, threads=0 if device == "cuda" else 1
    )
    measured = make_machine(device=device, settings=[setting])
    assert with_assumed_rates(measured, setting, "why").ceilings == measured.ceilings
    blank = Machine(fingerprint="x", measured_at="", host=measured.host, devices=measured.devices)
    full = with_assumed_rates(blank, setting, "why")
    assert full.warnings == ("why",)
    assert {c.rate.source for c in full.ceilings} == {"assumed"}
    from strategies import make_workload

    workload = make_workload(device=device)
    plan = rl.Plan(workers=workers, threads=setting.threads)
    assert rl.simulate(full, workload, plan).step_ns > 0


@pytest.mark.parametrize("seconds", [0, -1.0, float("inf"), float("nan"), True, "30"])
def test_seconds_are_a_number_above_zero(seconds: Any) -> None:
    """Anything else is refused at once."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(PlanError, match="wanted seconds as a finite number above 0, or None, got "):
        rl.TrainStep(model, loss_fn, optimizer, device="cpu", seconds=seconds)


def test_a_stopped_compiler_is_given_more_time_next(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a trial had taken when it was stopped over what was assumed of it; plain trials tell nothing."""
    right = choice.run_trial

    def stopped(make: Any, plan: Plan, *more: Any) -> Any:
        if is_compiled(plan):
            raise OutOfTimeError("time is up")
        return right(make, plan, *more)

    monkeypatch.setattr(choice, "run_trial", stopped)
    monkeypatch.setattr(choice, "compile_seconds", lambda *_: 1e-9)
    for seconds in (1e4, 1e6):  # however long a choice may take, it is the same step
        with start(lines, seconds=seconds) as step:
            assert any("was not tried to the end" in note for note in step.ranking.notes)
    known = compile_times.load(tmp_path).known
    assert {entry.step for entry in known} == {known[0].step}
    assert known[0].ratio > 1.0
