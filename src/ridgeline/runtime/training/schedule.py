"""The schedule of the learning rate in a run: made by the task, and resumed from checkpoints."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ridgeline.errors import CheckpointError, TaskError
from ridgeline.runtime.training.task import Task

_PROGRESS = {
    "last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "base_lrs",
}  # fmt: skip
"""What a scheduler's state says of how far it has come, and of the rates that the optimizer began with."""


def make(task: Task, optimizer: Optimizer, steps: int) -> LRScheduler | None:
    """The task's scheduler.

    Raises:
        TaskError: it cannot be stepped after every step, without arguments.
    """
    if task.scheduler is None:
        return None
    scheduler = task.scheduler(optimizer, steps)
    wanted = [
        name
        for name, parameter in inspect.signature(scheduler.step).parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if wanted:
        raise TaskError(
            "wanted a scheduler that is stepped after every training step, got "
            f"{type(scheduler).__name__} in task {task.name}, whose step() needs {', '.join(wanted)}; give "
            "another, or none"
        )
    return scheduler


def load(
    scheduler: LRScheduler | None,
    saved: Mapping[str, Any] | None,
    *,
    steps: int,
    planned: int,
    path: Path,
) -> None:
    """Put the schedule where it was.

    Args:
        scheduler: The task's, as made for this run; None: the rate is constant.
        saved: The state that a checkpoint has of it, if any.
        steps: Of this run.
        planned: Steps of the run of the checkpoint.
        path: The checkpoint, for messages.

    Raises:
        CheckpointError: it is another one: there was none, or there is none, or it is planned for a run of
            another length.
    """
    if (scheduler is None) != (saved is None):
        here, there = ("no", "one") if scheduler is None else ("a", "none")
        raise CheckpointError(
            f"wanted the task as it was, got {here} scheduler where the run had {there} in {path}; continue "
            "with the task as it was, or train into another run directory"
        )
    if scheduler is None or saved is None:
        return
    # One that does not depend on the length (a step every n, say) may go on in a longer run.
    if planned != steps:
        differing = settings_that_differ(scheduler.state_dict(), saved)
        if differing:
            raise CheckpointError(
                f"wanted a run of {planned} steps, for which its schedule was planned, got one of "
                f"{steps} ({', '.join(differing)} would differ) in {path}; continue with the "
                "epochs of that run, or train into another run directory"
            )
    scheduler.load_state_dict(dict(saved))


def settings_that_differ(mine: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the settings in which two schedulers' states differ; their progress is ignored."""
    names = sorted({*mine, *other} - _PROGRESS)
    return tuple(name for name in names if not _is_alike(mine.get(name), other.get(name)))


def _is_alike(mine: Any, other: Any) -> bool:
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        return not settings_that_differ(mine, other)
    if isinstance(mine, (list, tuple)) and isinstance(other, (list, tuple)):
        pairs = zip(mine, other, strict=False)
        return len(mine) == len(other) and all(_is_alike(a, b) for a, b in pairs)
    if isinstance(mine, Tensor) or isinstance(other, Tensor):
        first, second = (torch.as_tensor(one, device="cpu") for one in (mine, other))
        return bool(torch.equal(first, second.to(first)))
    return bool(mine == other)
