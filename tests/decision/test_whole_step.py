"""A step of the user's that is timed by its phases, and the choice that holds operators against it."""

import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, profiling, whole_step
from ridgeline.decision.trial import Script, taken_back
from ridgeline.decision.whole_step import phase_seconds
from ridgeline.errors import OutOfTimeError
from ridgeline.machine import Machine, OperatorTiming, Setting
from ridgeline.plan import Plan
from ridgeline.probe.measure import Known
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World
from strategies import make_machine, measured
from torchrun import torchrun

WORKER = Path(__file__).parent / "whole_step_worker.py"
X = torch.ones(8, 4)
ALONE = World(0, 1, 0, torch.device("cpu"))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def test_phases_of_a_step_are_timed_and_undone() -> None:
    """Each once a step, clearing the gradients with the optimizer; nothing of it is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    calls: list[int] = []

    def counted(model: nn.Module, batch: Tensor) -> Tensor:
        return loss_fn(model, batch)

    def make(plan: Plan) -> PlannedStep:
        calls.append(1)
        return PlannedStep(model, counted, optimizer, plan, world=ALONE, is_undone=True)

    random = torch.get_rng_state()
    plan = Plan(workers=1, threads=torch.get_num_threads())
    with taken_back(make, plan, Script(model, counted, optimizer), [X]) as step:
        found = phase_seconds(step, X, ALONE, 60.0)
    assert {"forward", "backward", "optimizer"} == set(found)
    assert min(found.values()) > 0.0
    assert calls == [1]
    assert all(map(torch.equal, before, model.parameters()))
    assert not optimizer.state
    assert torch.equal(random, torch.get_rng_state())


class Slow:
    """A step each phase of which takes as many seconds as it is told, by the clock of the test."""

    def __init__(self, seconds: list[float], fails_at: int = 1000) -> None:
        self.plan, self.now_s, self._seconds, self._fails_at = Plan(), 0.0, seconds, fails_at
        self.recorder = type("Recorder", (), {"listener": None})()
        self.num_steps = 0

    def __call__(self, batch: Any) -> Tensor:
        if self.num_steps == self._fails_at:
            raise ValueError("not finite")
        taken_s = self._seconds[min(self.num_steps, len(self._seconds) - 1)]
        self.num_steps += 1
        self.now_s += 0.25 * taken_s
        for name, share in (("forward", 1.0), ("backward", 2.0), ("optimizer", 0.5)):
            self.recorder.listener(name)
            self.now_s += share * taken_s
        return torch.zeros(())

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize(
    ("seconds", "num_steps"), [([100.0, 2.0], 2), ([1.0, 0.4], 4), ([0.4, 0.4], 4)]
)
def test_a_long_step_is_timed_as_rarely_as_can_be(
    seconds: list[float], num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps, which prepare, are in no figure."""
    step: Any = Slow(seconds)
    clock = SimpleNamespace(perf_counter=lambda: step.now_s)
    monkeypatch.setattr(whole_step, "time", clock)
    found = phase_seconds(step, X, ALONE, 60.0)
    assert step.num_steps == num_steps
    last = seconds[-1]
    assert found == pytest.approx({"forward": last, "backward": 2 * last, "optimizer": 0.75 * last})


@pytest.mark.parametrize(("fails_at", "is_timed"), [(4, False), (5, True)])
def test_a_step_that_fails_later_is_timed_until_then(
    fails_at: int, is_timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch again and again leads to values that the user's own checks refuse."""
    step: Any = Slow([0.01], fails_at)
    clock = SimpleNamespace(perf_counter=lambda: step.now_s)
    monkeypatch.setattr(whole_step, "time", clock)
    if is_timed:
        assert phase_seconds(step, X, ALONE, 60.0)["forward"] == pytest.approx(0.01)
    else:
        with pytest.raises(ValueError, match="not finite"):
            phase_seconds(step, X, ALONE, 60.0)


def test_several_workers_time_their_steps_at_once(tmp_path: Path) -> None:
    """As many each, whatever a script sends in them; where one fails, or time is up, all end."""
    torchrun(2, WORKER, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    for told in (first, second):
        assert told["all"]["seconds"] == pytest.approx(
            {"forward": 2e-3, "backward": 0.0, "optimizer": 0.0}
        )
        assert all(case["is_undone"] for case in told.values())
        assert told["no time"]["error"].startswith("OutOfTimeError: wanted another step within")
    assert first["all"]["calls"] == second["all"]["calls"] >= 3
    assert first["all"]["seconds"] == second["all"]["seconds"]
    assert first["one fails"]["error"] == "OtherFailedError: the step of another worker failed"
    assert second["one fails"]["error"] == "ValueError: not finite"
    for told in (first, second):
        assert set(told["one fails later"]["seconds"]) == set(told["all"]["seconds"])
        assert (told["one fails later"]["calls"], told["one fails later"]["error"]) == (12, "")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host whose profile is known; nothing is compiled on it, and nothing tried."""
    setting = Setting(device="cpu", workers=1, threads=torch.get_num_threads())
    now = datetime.datetime.now(datetime.UTC).isoformat()
    machine = msgspec.structs.replace(make_machine(settings=[setting]), measured_at=now)
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", lambda: Known(machine, tmp_path))

    def measure(workload: Any, **_: Any) -> Machine:
        timings = tuple(
            OperatorTiming(setting=setting, key=op.key, seconds=measured(1e-3, "s"))
            for op in workload.ops
        )
        return msgspec.structs.replace(machine, timings=timings)

    monkeypatch.setattr(profiling, "measure", measure)
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: 0.0)
    return machine


def start(**more: Any) -> rl.TrainStep:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rl.TrainStep(model, loss_fn, optimizer, device="cpu", progress=lambda line: None, **more)
    step.prepare(X)
    return step


def test_a_choice_rests_on_operators_that_add_up_to_a_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each was measured to take 1 ms; told in the notes."""

    def phases(*_: Any) -> dict[str, float]:
        ops = described[0].ops
        factors = {"forward": 1.5, "backward": 1.0}
        return {
            phase: 1e-3 * factor * sum(op.phase == phase for op in ops)
            for phase, factor in factors.items()
        }

    described: list[Any] = []
    measure = profiling.measure
    monkeypatch.setattr(
        profiling,
        "measure",
        lambda workload, **more: described.append(workload) or measure(workload=workload, **more),
    )
    monkeypatch.setattr(choice, "phase_seconds", phases)
    with start() as step:
        seconds = {t.key: t.seconds.value for t in step.machine.timings}
        for op in described[0].ops:
            assert seconds[op.key] == pytest.approx(1.5e-3 if op.phase == "forward" else 1e-3)
        assert any("in forward where its operators add up to" in note for note in step.notes)


@pytest.mark.parametrize(
    ("error", "note"),
    [
        (OutOfTimeError("over"), None),
        (
            RuntimeError("no room\nat all"),
            "operators were not compared with a whole step, which fails as written: RuntimeError: no room",
        ),
    ],
)
def test_a_step_that_cannot_be_timed_costs_the_check_alone(
    error: Exception, note: str | None, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan is chosen all the same."""

    def fails(*_: Any) -> dict[str, float]:
        raise error

    monkeypatch.setattr(choice, "phase_seconds", fails)
    with start() as step:
        assert step.ranking is not None
        assert [n for n in step.notes if "whole step" in n] == ([note] if note else [])
