"""`decide`: a saved profile that the trial contradicts is measured again, and nothing is tried twice."""

import msgspec
import pytest

from ridgeline.cli.decision import Wishes, decide
from ridgeline.cli.worker import Job
from ridgeline.machine import Machine
from ridgeline.timeline import Timeline
from strategies import make_machine

TRIAL = Timeline(origin="measured", title="t", workers=1, spans=(), steps_ns=(50_000_000,) * 3)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_profile_that_the_trial_contradicts_is_measured_again(
    is_given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """But not the profile of a file: what it describes may be another machine."""
    slow = make_machine(rate=1e6)
    asked: list[bool] = []
    tries: list[str] = []
    said: list[str] = []

    def measured(*, refresh: bool = False, **_: object) -> Machine:
        asked.append(refresh)
        return slow

    def tried(*_: object, **__: object) -> bytes:
        tries.append("trial")
        return msgspec.json.encode(TRIAL)

    monkeypatch.setattr("ridgeline.probe.measure.measure", measured)
    monkeypatch.setattr("ridgeline.probe.group.run_in_group", tried)
    path = slow.save(tmp_path_factory.mktemp("profile") / "machine.json")
    wishes = Wishes(workers=1, threads=2, tries=1, machine_file=path if is_given else None)
    job = Job(task="mlp")
    decision = decide(job.load(0), job, wishes, seed=0, steps=1000, say=said.append)
    assert decision.machine == slow
    assert tries == ["trial"]
    # The first call tells what devices there are.
    assert asked == ([] if is_given else [False, False, True])
    reasons = [line for line in said if line.endswith("the trial took 50.0 ms: measuring again")]
    assert len(reasons) == (0 if is_given else 1)
