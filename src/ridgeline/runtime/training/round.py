"""`Round`: a step of a run with all that a run does around it, so that trials and runs cost the same."""

from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.training.readings import LossReader
from ridgeline.workers.blackbox import BlackBox


class Round:
    """Train on a batch, keep its loss, advance the schedule, and leave a trace in case of a crash.

    Args:
        step: Trains on a batch.
        reader: Keeps the losses; whoever calls looks whether it is full.
        box: Told where the worker is, frame by frame.
        scheduler: Of the learning rate, stepped after every step; None: constant.
    """

    def __init__(
        self, step: PlannedStep, reader: LossReader, box: BlackBox, scheduler: LRScheduler | None
    ) -> None:
        self._step, self._reader, self._box, self._scheduler = step, reader, box, scheduler
        step.recorder.listener = box.frame

    def __call__(self, batch: Any, number: int) -> None:
        """The `number`-th step of the run, counted from 1.

        Raises:
            RidgelineError: see `PlannedStep`.
        """
        self._box.step(number)
        loss = self._step(batch)
        if self._scheduler is not None:
            self._scheduler.step()
        self._reader.add(loss)
