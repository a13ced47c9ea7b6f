"""The training step of a task as a `Workload`: what one worker does when a batch is shared out."""

import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from torch import nn

from ridgeline.errors import RidgelineError, TaskError
from ridgeline.runtime.steps.step import move
from ridgeline.runtime.training.fetching import fetch
from ridgeline.runtime.training.sampler import length
from ridgeline.runtime.training.task import Task
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload

_PACKAGE = Path(__file__).parents[1]


def step_workload(
    task: Task,
    *,
    workers: int = 1,
    device: str | None = None,
    precisions: Collection[str] = (),
    memory_formats: Collection[str] = (),
    may_run: bool = False,
) -> Workload:
    """What one of `workers` workers does in a step of the task; nothing is executed, unless it may be.

    Args:
        task: Its batch size is that of all workers together.
        workers: The global batch, or the data where that is less, is divided by this, rounding down as in
            training.
        device: `cpu` or `cuda`; None takes the GPU where there is one. `cuda` on a host without a GPU
            describes the step as well as it can be known here, and notes it.
        precisions: Also trace the step in these, see `trace`.
        memory_formats: And in these, likewise.
        may_run: Whether a step that cannot be traced otherwise may run, see `trace`.

    Raises:
        TaskError: the batch has fewer samples than there are workers.
        DataError: the training data is empty.
        WorkloadError: the step cannot be traced.

    Cost: Makes the model (on a GPU: moves it there) and loads one batch; the random state stays.
    """
    if task.batch_size < workers:
        raise TaskError(
            f"wanted at least one sample per worker, got batch_size={task.batch_size} over "
            f"workers={workers} in task {task.name}; raise the batch size or take fewer workers"
        )
    has_gpu = torch.cuda.is_available()
    wanted = torch.device(device or ("cuda" if has_gpu else "cpu"))
    place = wanted if has_gpu else torch.device("cpu")
    model = _made_model(task, place)
    available = length(task.train_data, "training")
    # One at least, as the data may have fewer samples than there are workers.
    samples = max(1, min(task.batch_size, available) // workers)
    batch = fetch(task.train_data, torch.arange(samples))
    optimizer = _made_optimizer(task, model)
    if wanted != place:
        optimizer = _grouped(optimizer)
    with _blamed(task, "loss_fn"):
        workload = trace(
            model,
            task.loss_fn,
            optimizer,
            batch,
            name=task.name,
            precisions=precisions,
            memory_formats=memory_formats,
            may_run=may_run,
            clip_norm=task.clip_norm,
        )
    if available < task.batch_size:
        note = f"the data has {available} samples, so that a batch of {task.batch_size} is one of {available}"
        workload = msgspec.structs.replace(workload, notes=(*workload.notes, note))
    return workload if wanted == place else _as_on_gpu(workload)


def _made_model(task: Task, place: torch.device) -> nn.Module:
    # Of the CPU alone, where models are made before they are moved.
    with torch.random.fork_rng(devices=[]), _blamed(task, "model"):
        made = task.model()
        if not isinstance(made, nn.Module):
            raise TypeError(f"it returned {type(made).__name__}, which is not a torch module")
        return move(made, place)


def _made_optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    with _blamed(task, "optimizer"):
        made = task.optimizer(model)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it returned {type(made).__name__}, which is not a torch optimizer")
        return made


@contextmanager
def _blamed(task: Task, part: str) -> Iterator[None]:
    """An exception becomes a `TaskError` that names the part of the task and the line that raised."""
    try:
        yield
    except RidgelineError:
        raise
    except (Exception, SystemExit) as error:  # a user's program may raise anything; it is chained
        frames = traceback.extract_tb(error.__traceback__)
        # The last frame outside of this package is the last of the task's own.
        theirs = [f for f in frames if not Path(f.filename).is_relative_to(_PACKAGE)]
        where = f" (at {theirs[-1].filename}:{theirs[-1].lineno})" if theirs else ""
        raise TaskError(
            f"wanted {part} of task {task.name} to work, got {type(error).__name__}: {error}{where}; fix the "
            "task"
        ) from error


def _grouped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with the grouped operators that it takes by itself on a GPU."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = True
    return optimizer


def _as_on_gpu(workload: Workload) -> Workload:
    """The workload of a GPU as far as a host without one can know it."""
    note = (
        "traced on a host without a GPU: operators that have another form there are priced by the curves of "
        "their families"
    )
    variants = tuple(map(_as_on_gpu, workload.variants))
    notes = (*workload.notes, note)
    return msgspec.structs.replace(workload, device="cuda", variants=variants, notes=notes)
