"""A doubtful profile is measured again by the next start on a quiet host, and what rests on it is made anew."""

import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.decision import choice, profiling, retaking
from ridgeline.decision.memory import recalling, remembered
from ridgeline.errors import SideEffectError
from ridgeline.machine import Machine
from ridgeline.machine.host_load import HostLoad
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.planner.doubted import MOST_RETAKES
from ridgeline.probe.measure import Known
from ridgeline.timeline import Timeline
from ridgeline.tracing.capture import trace
from strategies import make_machine

QUIET, BUSY = HostLoad(others=0.0), HostLoad(others=0.5)
BESIDE = "the profile was measured while other programs used 50.0 % of the processors"
DOUBTFUL = f"{BESIDE}: what is predicted from it may be far off"
BATCH = torch.ones(8, 4)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def never() -> HostLoad:
    return pytest.fail("listened")


def test_a_profile_without_doubts_costs_nothing() -> None:
    """Nobody listens, and there is nothing to say."""
    assert retaking.due(make_machine(), never) == ("", ())


def test_a_doubtful_one_waits_for_a_quiet_host() -> None:
    """Until then it is used, and said to be doubtful."""
    machine = msgspec.structs.replace(make_machine(), host_load=BUSY)
    assert retaking.due(machine, lambda: QUIET) == (BESIDE, ())
    busy = HostLoad(stolen=0.2)
    not_yet = (
        "the profile is not measured again yet: right now the host of this virtual machine took 20.0 % of its "
        "processors"
    )
    assert retaking.due(machine, lambda: busy) == ("", (DOUBTFUL, not_yet))


def test_a_full_profile_is_its_owners() -> None:
    """It took minutes, which no start takes unasked."""
    machine = msgspec.structs.replace(make_machine(), host_load=BUSY, effort="full")
    line = "a full profile is measured again by `ridgeline measure --full --refresh`"
    assert retaking.due(machine, never) == ("", (DOUBTFUL, line))


def test_what_was_measured_often_enough_is_only_said() -> None:
    """Listening would lead to nothing."""
    machine = msgspec.structs.replace(make_machine(), host_load=BUSY, retakes=MOST_RETAKES)
    assert retaking.due(machine, never) == ("", (DOUBTFUL,))


@pytest.mark.parametrize(("retakes", "ending"), [(0, ": the next start measures again"), (1, "")])
def test_trials_leave_a_mark_once(retakes: int, ending: str) -> None:
    """Told with what follows; a profile that has one gets no other."""
    model = nn.Linear(4, 2)
    workload = trace(model, loss_fn, torch.optim.SGD(model.parameters(), 0.1), BATCH)
    machine = msgspec.structs.replace(make_machine(), retakes=retakes)
    measured = Timeline(origin="measured", title="", spans=(), workers=1, steps_ns=(10**11,))
    ranking = choose(machine, workload, trial=lambda plan: measured, fixed={"execution": "eager"})
    lines: list[str] = []
    doubt = retaking.doubting(
        lambda machine, suspect, retakes: msgspec.structs.replace(
            machine, suspect=suspect, retakes=retakes
        ),
        lines.append,
    )
    marked = doubt(machine, ranking)
    assert marked.suspect.endswith("for a plain step whose trial took 100 s")
    assert marked.retakes == retakes
    assert lines == [f"{marked.suspect}{ending}"]
    assert doubt(marked, ranking) == marked
    assert len(lines) == 1


class Host:
    """A host with a cache, whose profile is as old as its name says; what is measured is quiet."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.directory, self.machine = directory, machine
        self.measured: list[bool] = []
        self.missing_s = 0.0
        self.load = QUIET

    def known(self) -> Known:
        return Known(self.machine, self.directory)

    def measure(self, *, refresh: bool, **_: Any) -> Machine:
        self.measured.append(refresh)
        if refresh:
            now = datetime.datetime.now(datetime.UTC).isoformat()
            self.machine = msgspec.structs.replace(
                self.machine, measured_at=now, host_load=QUIET, suspect="", retakes=0
            )
        return self.machine

    def marked(self, machine: Machine, suspect: str, retakes: int) -> Machine:
        marks = {"suspect": suspect, "retakes": retakes}
        self.machine = msgspec.structs.replace(self.machine, **marks)
        return msgspec.structs.replace(machine, **marks)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Nothing is compiled on it; what is predicted of it is right, as far as its profile is new."""
    setting = rl.machine.Setting(device="cpu", workers=1, threads=torch.get_num_threads())
    now = datetime.datetime.now(datetime.UTC).isoformat()
    machine = msgspec.structs.replace(
        make_machine(settings=[setting]), measured_at=now, host_load=BUSY
    )
    host = Host(tmp_path, machine)
    for place in (choice, profiling):
        monkeypatch.setattr(place, "known_machine", host.known)
    monkeypatch.setattr(profiling, "measure", host.measure)
    monkeypatch.setattr(profiling, "marked", host.marked)
    monkeypatch.setattr(profiling, "listen", lambda: host.load)
    monkeypatch.setattr(profiling, "missing_seconds", lambda *_, **__: host.missing_s)
    monkeypatch.setattr(recalling, "AS_REMEMBERED", float("inf"))  # however busy the machine is
    monkeypatch.setattr(retaking.doubted, "suspicion", lambda *_: "")
    right = choice.choose

    def eager(*arguments: Any, **more: Any) -> Any:
        return right(*arguments, **{**more, "fixed": {**more["fixed"], "execution": "eager"}})

    monkeypatch.setattr(choice, "choose", eager)
    return host


def start(lines: list[str], width: int = 2, **more: Any) -> rl.TrainStep:
    lines.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, width)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = rl.TrainStep(model, loss_fn, optimizer, device="cpu", progress=lines.append, **more)
    step.prepare(BATCH)
    return step


def test_the_next_start_on_a_quiet_host_measures_and_chooses_again(host: Host) -> None:
    """Beside others it takes what is remembered; once measured in quiet, nothing is doubted any more."""
    lines: list[str] = []
    host.load = BUSY
    with start(lines) as step:
        assert DOUBTFUL in step.notes
    with start(lines) as step:
        assert any("an earlier start chose" in line for line in lines)
        assert DOUBTFUL in step.notes
    assert host.measured == [False]
    host.load = QUIET
    with start(lines) as step:
        assert f"{BESIDE}: measuring again" in lines
        assert not any("an earlier start chose" in line for line in lines)
        assert DOUBTFUL not in step.notes
    assert host.measured == [False, True]
    assert host.machine.retakes == 1
    with start(lines):
        assert any("an earlier start chose" in line for line in lines)
    assert host.measured == [False, True]


def test_without_time_it_is_not_measured_again(host: Host) -> None:
    """The choice keeps to its seconds, and says what it rests on."""
    lines: list[str] = []
    host.missing_s = 1e3
    with start(lines, seconds=100.0) as step:
        assert f"{BESIDE}; there is no time to measure it again" in step.notes
    assert host.measured == []


def test_a_remembered_choice_is_predicted_anew_by_a_new_profile(host: Host) -> None:
    """Once: another step had the machine measured again, and this one's operators are timed for it."""
    lines: list[str] = []
    host.machine = msgspec.structs.replace(host.machine, host_load=QUIET)
    with start(lines) as step:
        before = step.predicted().step_ns
    assert host.measured == [False]
    twice = make_machine(settings=[host.machine.ceilings[0].setting], rate=0.5e9)
    host.machine = msgspec.structs.replace(twice, measured_at="2026-01-01T00:00:00+00:00")
    for _ in range(2):
        with start(lines) as step:
            assert any("an earlier start chose" in line for line in lines)
            assert step.predicted().step_ns > 1.5 * before
        assert host.measured == [False, False]
    host.machine = msgspec.structs.replace(host.machine, measured_at="2026-02-02T00:00:00+00:00")
    host.missing_s = 1e3
    (kept,) = host.directory.glob("choice-*.json")
    found = remembered.Remembered.load(kept)
    assert found.profile == "2026-01-01T00:00:00+00:00"
    with start(lines, seconds=100.0) as step:
        assert recalling.PREDICTED_BEFORE in step.notes
    assert remembered.Remembered.load(kept).profile == found.profile


def test_a_given_profile_is_said_to_be_doubtful(host: Host) -> None:
    """Measuring here would tell nothing about it."""
    lines: list[str] = []
    with start(lines, machine=host.machine) as step:
        assert DOUBTFUL in step.notes
        assert step.plan.settings == Plan(threads=torch.get_num_threads()).settings
    assert host.measured == []


def test_why_nothing_was_chosen_is_the_first_note(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only to be known of the profile comes behind it."""

    def writes(**_: Any) -> Machine:
        raise SideEffectError("it writes")

    host.load = BUSY
    monkeypatch.setattr(profiling, "measure", writes)
    with start([]) as step:
        assert step.notes[:2] == (
            "the step runs as it was written, since a trial could not be taken back: it writes",
            DOUBTFUL,
        )
