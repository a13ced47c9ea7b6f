"""What all ways train: the same model from the same state on the same batches; and what a way sent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline import tasks
from ridgeline.experiments.contests import nothing
from ridgeline.experiments.namespaces import INTERFACE
from ridgeline.experiments.ways.case import WayRemarks, WayRunner
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World

BATCHES = 4
CHECKED_STEPS = 4
"""From the same state, after which all ways are compared: enough for a second cut of buckets, and for hooks
that send everything at first."""

Step = Callable[[Any], Tensor]


class Training:
    """A task of `rl.tasks`, its batches for this worker.

    Raises:
        DataError: the data is missing.
    """

    def __init__(self, world: World, name: str, batch: int) -> None:
        self.world = world
        self.name = name
        # The whole batch, of which a worker takes its part below.
        self._task = getattr(tasks, name)(batch_size=batch * world.size)
        data = self._task.train_data
        # One order on all workers, of which each takes its own part.
        every = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        self.batches = []
        for index in range(BATCHES):
            first = (index * world.size + world.rank) * batch
            images, labels = data.batch(every[first : first + batch])
            self.batches.append((images.to(world.device), labels.to(world.device)))

    def made(self) -> nn.Module:
        """The model, with the same parameters each time and on every worker."""
        torch.manual_seed(0)
        return self._task.model().to(self.world.device)

    @property
    def loss_fn(self) -> Callable[[nn.Module, Any], Tensor]:
        """Of the task."""
        return self._task.loss_fn

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Of the task."""
        return self._task.optimizer(model)


def make_runner(
    training: Training,
    make: Callable[[nn.Module], Step],
    is_counted: bool,
    units: int = 1,
    lead: int = 0,
    predicted_s: float | None = None,
    notes: tuple[str, ...] = (),
) -> WayRunner:
    """A way to train: one step a run, compared by what the first steps changed.

    Args:
        training: What is trained.
        make: Makes the step of a model.
        is_counted: Whether to read the counters of the link.
        units: Steps of a run, where not all cost the same.
        lead: Steps before the first run, so that what is sent beside steps is sent within runs.
        predicted_s: Of a step.
        notes: About it.
    """
    model = training.made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    step = make(model)
    counted = _Counted()
    batches = training.batches

    def run() -> None:
        for index in range(units):
            step(batches[index % len(batches)])
        counted.steps += units

    def results() -> list[Tensor]:
        for index in range(CHECKED_STEPS):
            step(batches[index])
        after = [parameter.detach() for parameter in model.parameters()]
        changes = [(b - a).flatten() for a, b in zip(before, after, strict=True)]
        # Never needed again, and as large as the model.
        before.clear()
        for index in range(lead):
            step(batches[index % len(batches)])
        return [torch.cat(changes)]

    def remarks() -> WayRemarks:
        return WayRemarks(notes=notes, predicted_s=predicted_s, wire_bytes=counted.bytes_a_step())

    return WayRunner(
        run=run,
        results=results,
        units=units,
        remarks=remarks,
        close=step.close if isinstance(step, PlannedStep) else nothing,
        before_turn=counted.begin if is_counted else nothing,
        # Held buckets of the last step would still be on their way.
        settle=step.wait if isinstance(step, PlannedStep) else nothing,
        after_turn=counted.end if is_counted else nothing,
    )


class _Counted:
    """What the link has carried away in the turns of a way, and the steps of these turns.

    A step can return while the last of what it sent still waits for the link. A turn is over when the other
    workers have said that theirs is, which they do after they received everything; what they exchange for
    this, a few hundred bytes a turn, is counted too.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._bytes = self._counted_steps = 0
        self._before = (0, 0)

    def begin(self) -> None:
        """A turn begins."""
        self._before = sent_bytes(), self.steps

    def end(self) -> None:
        """A turn has ended on every worker."""
        bytes_before, steps_before = self._before
        self._bytes += sent_bytes() - bytes_before
        self._counted_steps += self.steps - steps_before

    def bytes_a_step(self) -> int | None:
        """The mean, None where nothing was counted."""
        return self._bytes // self._counted_steps if self._counted_steps else None


def sent_bytes() -> int:
    """Bytes that this host has sent over its link so far, headers included.

    Source: the ninth number of an interface in /proc/net/dev is what it transmitted.
    """
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == INTERFACE:
            return int(numbers.split()[8])
    return 0
