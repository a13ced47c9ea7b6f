"""`decide`: a saved profile that the trial contradicts is measured again, and nothing is tried twice."""

import dataclasses

import msgspec
import pytest
import torch

from ridgeline.cli.training.decision import Wishes, decide
from ridgeline.cli.training.training_run import num_steps
from ridgeline.cli.training.worker import Job
from ridgeline.errors import DataError
from ridgeline.machine import Machine
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.timeline import Timeline
from ridgeline.workers.world import World
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
    monkeypatch.setattr("ridgeline.probe.groups.group.run_in_group", tried)
    path = slow.save(tmp_path_factory.mktemp("profile") / "machine.json")
    wishes = Wishes(workers=1, threads=2, tries=1, machine_file=path if is_given else None)
    job = Job(task="mlp")
    decision = decide(job.load(0), job, wishes, seed=0, steps=1000, say=said.append)
    assert decision.machine == slow
    assert tries == ["trial"]
    assert asked == ([] if is_given else [False, True])
    reasons = [line for line in said if line.endswith("the trial took 50.0 ms: measuring again")]
    assert len(reasons) == (0 if is_given else 1)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("samples", [3, 60, 64, 66, 1437])
def test_a_run_has_as_many_steps_as_training_takes(samples: int, workers: int) -> None:
    """The last batch of every epoch is a step where each worker gets a sample of it."""
    data = torch.utils.data.TensorDataset(torch.zeros(samples, 1))
    task = dataclasses.replace(Job(task="mlp").load(0), train_data=data, batch_size=64)
    try:
        world = World(0, workers, 0, torch.device("cpu"))
        each = Sampler(data, task.batch_size, world, seed=0).steps_per_epoch
    except DataError:
        each = 0
    assert num_steps(task, 8, workers=workers) == max(1, 8 * each)
