"""The profile that a task is planned by: doubtful ones are measured again, and choices that rest on others timed."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.cli.arguments.wishes import Wishes
from ridgeline.cli.training import decision as choosing
from ridgeline.cli.training import profiles
from ridgeline.cli.training.decision import Decision, decide
from ridgeline.cli.training.worker import Job
from ridgeline.machine import Machine
from ridgeline.machine.host_load import HostLoad
from ridgeline.probe import measure
from ridgeline.probe.host import load
from ridgeline.timeline import Timeline

BUSY = HostLoad(others=0.5)
BESIDE = "the profile was measured while other programs used 50.0 % of the processors"


class Host:
    """A host with a cache: what is asked of it, and what a step takes on it."""

    def __init__(self, directory: Path, machine: Machine) -> None:
        self.directory, self.machine = directory, machine
        self.asked: list[bool] = []
        self.load = HostLoad()
        self.held = 1.0

    def known(self) -> measure.Known:
        return measure.Known(self.machine, self.directory)

    def measured(self, *_: Any, refresh: bool = False, **__: Any) -> Machine:
        self.asked.append(refresh)
        if refresh:
            self.machine = msgspec.structs.replace(
                self.machine, measured_at="2026-02-02T00:00:00+00:00", host_load=None, suspect=""
            )
        return self.machine

    def held_against(self, machine: Machine, *_: Any) -> Machine:
        """A step takes longer than its operators add up to."""
        ceilings = tuple(
            msgspec.structs.replace(each, rate=each.rate.times(1.0 / self.held), curve=())
            for each in machine.ceilings
        )
        return msgspec.structs.replace(machine, ceilings=ceilings)

    def marked(self, machine: Machine, suspect: str, retakes: int) -> Machine:
        marks = {"suspect": suspect, "retakes": retakes}
        self.machine = msgspec.structs.replace(self.machine, **marks)
        return msgspec.structs.replace(machine, **marks)


def trial(_: object) -> Timeline:
    return Timeline(origin="measured", title="tiny", workers=1, spans=(), steps_ns=(40_000,))


@pytest.fixture
def host(machine_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    machine = msgspec.structs.replace(
        Machine.load(machine_file), measured_at="2026-01-01T00:00:00+00:00"
    )
    host = Host(tmp_path / "cache", machine)
    monkeypatch.setattr(measure, "known_machine", host.known)
    monkeypatch.setattr(measure, "marked", host.marked)
    monkeypatch.setattr(load, "listen", lambda: host.load)
    monkeypatch.setattr(profiles, "measured", host.measured)
    monkeypatch.setattr(profiles, "held_against_task", host.held_against)
    monkeypatch.setattr(choosing, "try_apart", trial)
    monkeypatch.setattr(choosing.staleness, "why_stale", lambda *_: None)
    return host


def chosen(task: str, said: list[str]) -> Decision:
    job, wishes = Job(task=task), Wishes(workers=1, threads=2, tries=2)
    said.clear()
    return decide(job.load(0), job, wishes, seed=0, steps=10**9, say=said.append)


def test_a_second_start_predicts_what_the_first_one_did(task_file: str, host: Host) -> None:
    """Also what a whole step told of the operators, which is not kept with the profile; nothing is timed."""
    host.held = 1.5
    first = chosen(task_file, [])
    host.asked.clear()
    second = chosen(task_file, [])
    assert host.asked == []
    assert second.predicted.steps_ns == first.predicted.steps_ns
    assert second.predicted.notes == first.predicted.notes
    assert any(span.detail for span in second.predicted.spans)
    assert second.ranking is not None
    assert second.ranking.best.timeline == second.predicted


def test_a_choice_from_another_profile_is_timed_and_predicted_anew(
    task_file: str, host: Host
) -> None:
    """Once; its plan is tried as before."""
    said: list[str] = []
    first = chosen(task_file, said)
    host.machine = msgspec.structs.replace(host.machine, measured_at="2026-01-02T00:00:00+00:00")
    host.held = 100.0
    host.asked.clear()
    second = chosen(task_file, said)
    assert any(line.endswith("which an earlier start chose for this step") for line in said)
    assert host.asked == [False]
    assert second.predicted.step_ns > 1.5 * first.predicted.step_ns
    third = chosen(task_file, said)
    assert host.asked == [False]
    assert third.predicted.steps_ns == second.predicted.steps_ns


def test_a_profile_measured_beside_load_is_measured_again_in_quiet(
    task_file: str, host: Host
) -> None:
    """With the choice that rests on it, and once."""
    said: list[str] = []
    host.machine = msgspec.structs.replace(host.machine, host_load=BUSY)
    host.load = BUSY
    chosen(task_file, said)
    assert f"{BESIDE}: what is predicted from it may be far off" in said
    assert host.asked == [False]
    host.load = HostLoad()
    chosen(task_file, said)
    assert f"{BESIDE}: measuring again" in said
    assert not any("an earlier start" in line for line in said)
    assert host.asked == [False, True]
    assert host.machine.retakes == 1
    chosen(task_file, said)
    assert host.asked == [False, True]


def test_a_profile_that_trials_contradict_is_measured_again_once(
    task_file: str, host: Host
) -> None:
    """They say what it predicted and what they took; where it is no better then, so be it."""
    said: list[str] = []
    host.held = 1000.0
    chosen(task_file, said)
    assert host.machine.suspect.startswith("the profile measured at 2026-01-01T00:00:00+00:00")
    assert f"{host.machine.suspect}: the next start measures again" in said
    why = host.machine.suspect
    chosen(task_file, said)
    assert f"{why}: measuring again" in said
    assert (host.machine.suspect, host.machine.retakes) == ("", 1)
    assert host.asked == [False, True]
    chosen(task_file, said)
    assert host.asked == [False, True]
