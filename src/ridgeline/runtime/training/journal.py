"""The journal of a run: its position, its history so far, and what is reported of it."""

import math
import time
from collections.abc import Sequence

from ridgeline.history import EpochPoint, History, Outage, StepPoint
from ridgeline.recording.progress import Progress
from ridgeline.runtime.checkpoints.checkpoint import Position
from ridgeline.runtime.training.readings import Window
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.runtime.training.training_state import Course

HISTORY_POINTS = 2000
"""Most steps kept in a history: more than a chart can show; long runs keep every n-th."""


class Journal:
    """Counts steps and epochs, and keeps losses, speeds and metrics; equal on all workers but for times.

    Attributes:
        epoch: The current epoch, from 0.
        step_in_epoch: Steps done in it.
        step: Steps done in all.
        exposed_s: Exposed communication of the median step, once somebody looked; for progress only.
    """

    def __init__(self, task: str, sampler: Sampler, epochs: int) -> None:
        self._task = task
        self._sampler = sampler
        self._epochs = epochs
        self.total_steps = epochs * sampler.steps_per_epoch
        self._stride = max(1, math.ceil(self.total_steps / HISTORY_POINTS))
        self.epoch = self.step_in_epoch = self.step = 0
        self.exposed_s: float | None = None
        self._loss_sum = self._train_s = self._loss = self._speed = 0.0
        self._steps: list[StepPoint] = []
        self._epoch_points: list[EpochPoint] = []
        self._outages_before: tuple[Outage, ...] = ()
        self._outages: tuple[Outage, ...] = ()
        self._since_s = time.perf_counter()

    def take_up(self, course: Course) -> None:
        """Continue from the position of a checkpoint."""
        position = course.position
        self.epoch, self.step_in_epoch = position.epoch, position.step_in_epoch
        self.step = position.step
        self._loss_sum, self._train_s = course.loss_sum, course.train_s
        self._steps, self._epoch_points = list(course.steps), list(course.epochs)
        self._outages_before = course.outages

    def restart_clock(self) -> None:
        """Measure speed from now on; the time since the last reading was not spent on training."""
        self._since_s = time.perf_counter()

    def count(self) -> None:
        """A step was taken."""
        self.step += 1
        self.step_in_epoch += 1

    def place(self, step: int) -> tuple[int, int]:
        """Epoch and step within it of the `step`-th step of the run, counted from 1."""
        return divmod(step - 1, self._sampler.steps_per_epoch)

    def note(self, windows: Sequence[Window]) -> None:
        """Keep the losses of some steps, and the time since the last reading, which they share."""
        now = time.perf_counter()
        elapsed_s, self._since_s = now - self._since_s, now
        self._train_s += elapsed_s
        losses = [
            (window.first_step + index, mean)
            for window in windows
            for index, mean in enumerate(window.means)
        ]
        samples = sum(self._sampler.samples_at(self.place(step)[1]) for step, _ in losses)
        self._speed = samples / elapsed_s
        for step, mean in losses:
            self._loss_sum += mean
            self._loss = mean
            if step % self._stride == 0:
                point = StepPoint(step=step, epoch=self.epoch, loss=mean, samples_per_s=self._speed)
                self._steps.append(point)

    def note_outages(self, outages: Sequence[Outage]) -> None:
        """Replace the outages that workers reported since this start of the run."""
        self._outages = tuple(sorted(outages, key=lambda outage: outage.began_at))

    def end_epoch(self, metric: float) -> None:
        """The epoch is trained and evaluated."""
        point = EpochPoint(
            epoch=self.epoch,
            step=self.step,
            metric=metric if math.isfinite(metric) else None,
            mean_loss=self._loss_sum / self._sampler.steps_per_epoch,
            train_s=self._train_s,
        )
        self._epoch_points.append(point)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self._loss_sum = self._train_s = 0.0

    def course(self) -> Course:
        """The part of the journal that a checkpoint keeps."""
        return Course(
            position=Position(epoch=self.epoch, step_in_epoch=self.step_in_epoch, step=self.step),
            loss_sum=self._loss_sum,
            train_s=self._train_s,
            steps=tuple(self._steps),
            epochs=tuple(self._epoch_points),
            outages=self._outages_before + self._outages,
        )

    def history(self) -> History:
        """How the run went."""
        course = self.course()
        return History(
            task=self._task, steps=course.steps, epochs=course.epochs, outages=course.outages
        )

    def progress(self) -> Progress:
        """The state of the run for people to watch."""
        return Progress(
            # Behind the last epoch the count is one too many.
            epoch=min(self.epoch, self._epochs - 1),
            epochs=self._epochs,
            step=self.step,
            total_steps=self.total_steps,
            loss=self._loss,
            samples_per_s=self._speed,
            metrics=tuple(point.metric for point in self._epoch_points),
            exposed_s=self.exposed_s,
        )
