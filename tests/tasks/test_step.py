"""A task's step as a workload, also for GPUs that this host does not have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ridgeline.errors import TaskError
from ridgeline.tasks import load_task
from ridgeline.tasks.step import step_workload


def test_a_worker_gets_its_share_of_the_batch() -> None:
    """The global batch is divided by the number of workers."""
    task = load_task("mlp", batch_size=64)
    assert [step_workload(task, workers=n, device="cpu").samples for n in (1, 4)] == [64, 16]


def test_a_gpu_step_is_described_without_a_gpu() -> None:
    """A machine file of a GPU can be simulated anywhere; the workload says how it came about."""
    task = load_task("mlp")
    here, there = (step_workload(task, device=device) for device in ("cpu", "cuda"))
    assert (here.device, there.device) == ("cpu", "cuda")
    assert here.notes == ()
    [note] = there.notes
    assert note.startswith(
        "traced on a host without a GPU: operators that have another form there are"
    )
    assert there.phase("forward") == here.phase("forward")
    assert any("_foreach" in op.name for op in there.phase("optimizer"))


def test_fewer_samples_than_workers_are_refused() -> None:
    """Every worker needs a sample."""
    with pytest.raises(
        TaskError, match="wanted at least one sample per worker, got batch_size=4 over"
    ):
        step_workload(load_task("mlp", batch_size=4), workers=8, device="cpu")


@pytest.mark.parametrize(
    ("part", "made", "message"),
    [
        (
            "optimizer",
            lambda model: None,
            r"got TypeError: it returned NoneType, which is not a torch",
        ),
        (
            "model",
            lambda: torch.nn.Linear(-1, 1),
            r"wanted model of task mlp to work, got RuntimeError",
        ),
        (
            "model",
            lambda: None,
            r"got TypeError: it returned NoneType, which is not a torch module; fix the task$",
        ),
        (
            "loss_fn",
            lambda model, batch: {}["loss"],
            r"got KeyError: 'loss' \(at .*test_step.py:\d+\); fix the task",
        ),
    ],
)
def test_what_the_task_raises_names_its_part(
    part: str, made: Callable[..., Any], message: str
) -> None:
    """In one line, with where it was raised."""
    task = dataclasses.replace(load_task("mlp"), **{part: made})
    with pytest.raises(TaskError, match=message):
        step_workload(task, device="cpu")


def test_a_batch_of_more_than_there_is_is_noted() -> None:
    """Training would take what there is; the description says so."""
    workload = step_workload(load_task("mlp", batch_size=1 << 20), device="cpu")
    note = f"the data has {workload.samples} samples, so that a batch of {1 << 20} is one of {workload.samples}"
    assert note in workload.notes
    shared = step_workload(load_task("mlp", batch_size=1 << 20), workers=2, device="cpu")
    assert (shared.samples, note in shared.notes) == (workload.samples // 2, True)
    assert not any("samples" in n for n in step_workload(load_task("mlp"), device="cpu").notes)
