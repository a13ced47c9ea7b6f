"""A task's own step, timed by processes of its own, that operators are held against before a plan is chosen."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ridgeline.cli.arguments.wishes import Wishes
from ridgeline.cli.training import profiles
from ridgeline.cli.training.apart import PHASES, phases_apart
from ridgeline.cli.training.decision import decide
from ridgeline.cli.training.profiles import held_against_task
from ridgeline.cli.training.worker import Job, TrialRequest
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.machine import Machine, OperatorTiming, Quantity, Setting
from ridgeline.plan import Plan
from ridgeline.workload import Workload


def test_operators_are_held_against_steps_of_as_many_workers(
    task_file: str, machine_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each number of workers that is compared, those of which take longest."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("ridgeline.probe.host.fingerprint.num_cores", lambda: 2)
    machine = Machine.load(machine_file)
    asked: list[tuple[str, int, int]] = []

    def run(target: str, request: bytes, *, workers: int, threads: int, **_: object) -> bytes:
        assert msgspec.json.decode(request, type=TrialRequest).plan.workers == workers
        asked.append((target, workers, threads))
        return msgspec.json.encode({"forward": 1.0, "backward": 1.0, "optimizer": 1.0})

    def timed(workload: Workload, setting: Setting, *_: object, **__: object) -> Machine:
        settings = [Setting(device="cpu", workers=n, threads=2 // n) for n in (1, 2)]
        timings = [
            OperatorTiming(setting=place, key=op.key, seconds=Quantity.measured([0.1], "s"))
            for place in settings
            for op in workload.ops
        ]
        return msgspec.structs.replace(machine, timings=tuple(timings))

    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", run)
    monkeypatch.setattr(profiles, "measured", timed)
    job, wishes = Job(task=task_file), Wishes(tries=0)
    said: list[str] = []
    decision = decide(job.load(0), job, wishes, seed=0, steps=100, say=said.append)
    assert asked == [(PHASES, 1, 2), (PHASES, 2, 1)]
    told = [w for w in decision.machine.warnings if w.startswith("the host takes for a whole step")]
    assert len(told) == 2
    assert set(told) <= set(said)
    one = {t.key: t.seconds.value for t in decision.machine.timings if t.setting.workers == 1}
    assert set(one.values()) != {0.1}


def test_workers_time_their_steps(
    task_file: str, machine_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, each its own share of the batch; a step that fails costs the check alone."""
    path, plan = Path(task_file), Plan(workers=2, threads=1)
    request = TrialRequest(job=Job(task=task_file), plan=plan, device="cpu", seed=0)
    assert set(phases_apart(request)) == {"forward", "backward", "optimizer"}
    broken = "def loss_fn(model, batch):\n    raise LookupError('no such label')\n"
    path.write_text(f"{path.read_text()}\n{broken}")
    said: list[str] = []
    machine, setting = Machine.load(machine_file), Setting(device="cpu", workers=2, threads=1)
    monkeypatch.setattr(profiles, "is_long", lambda *_: False)
    workload: Any = None  # nobody comes to it
    with Heartbeat(said.append) as heartbeat:
        phases = partial(phases_apart, request)
        found = held_against_task(machine, workload, setting, phases, heartbeat)
    assert found is machine
    (told,) = (line for line in said if not line.startswith("  still "))
    assert told.startswith("operators were not compared with a whole step: ")
    assert "no such label" in told


def test_a_long_step_is_left_to_trials(machine_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody makes it."""

    def fails() -> dict[str, float]:
        raise AssertionError("made")

    monkeypatch.setattr(profiles, "is_long", lambda *_: True)
    machine, setting = Machine.load(machine_file), Setting(device="cpu", workers=1, threads=2)
    workload: Any = None
    with Heartbeat(print) as heartbeat:
        assert held_against_task(machine, workload, setting, fails, heartbeat) is machine
