"""The training loop: epochs of steps, evaluation, checkpoints, and a clean end in every case.

All workers run it side by side. They meet at the readings of the loss (see `readings`), where they
decide together whether to stop; so a NaN or a full disk ends every worker with the same message, and
none is left waiting.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ridgeline.codec import Value
from ridgeline.errors import CheckpointError, NonFiniteError
from ridgeline.history import EpochPoint, History, StepPoint
from ridgeline.plan import Plan
from ridgeline.runtime import checkpoint, random_state, training_state
from ridgeline.runtime.agree import gather_bytes
from ridgeline.runtime.blackbox import BlackBox
from ridgeline.runtime.engine import Engine
from ridgeline.runtime.evaluate import evaluate
from ridgeline.runtime.feed import feed
from ridgeline.runtime.non_finite import explain
from ridgeline.runtime.readings import LossReader, Window
from ridgeline.runtime.sampler import Sampler
from ridgeline.runtime.saver import Saver
from ridgeline.runtime.step import TrainStep, move
from ridgeline.runtime.task import Task
from ridgeline.runtime.training_state import Course, Identity, Trained
from ridgeline.runtime.world import World
from ridgeline.timeline import Timeline

HISTORY_POINTS = 2000
"""Most steps kept in a history: more than a chart can show; long runs keep every n-th."""
KEEP_CHECKPOINTS = 3


class Progress(Value, frozen=True, kw_only=True):
    """The state of a run at a reading, for people to watch.

    `metric` is that of the last finished epoch; `exposed_s` is the exposed communication of the median
    step, as far as it was looked at. `total_steps` are those of the whole run.
    """

    epoch: int
    epochs: int
    step: int
    total_steps: int
    loss: float
    samples_per_s: float
    metric: float | None = None
    exposed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run gives: its history, and the timeline of this worker's last steps."""

    history: History
    timeline: Timeline


def train(
    task: Task,
    plan: Plan,
    world: World,
    *,
    run_dir: Path,
    epochs: int,
    seed: int = 0,
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> TrainResult:
    """Train a task under a plan; every worker calls this alike.

    Rank 0 continues with the random numbers that making the model left, the other workers with their
    own. On the CPU a resumed run has bitwise the losses of one that was never stopped.

    Args:
        task: What to train.
        plan: How; `plan.workers` must be the size of the world.
        world: This worker's place.
        run_dir: Gets `checkpoints/` and `blackbox/`.
        epochs: Passes over the training data, in all.
        seed: Of the model, the order of the data, and everything random.
        resume: Go on from the newest checkpoint in `run_dir`, if there is one.
        checkpoint_every: Steps between checkpoints, beside those at the end of every epoch.
        on_progress: Called on rank 0 at every reading.

    Raises:
        PlanError: the plan asks for what this release or this world does not offer.
        NonFiniteError: the loss became NaN or infinite; on all workers.
        CheckpointError: a checkpoint could not be written or read; on all workers.
        DataError: the data set is empty.
    """
    run = _Run(task, plan, world, run_dir=run_dir, epochs=epochs, seed=seed)
    run.on_progress = on_progress
    run.checkpoint_every = checkpoint_every
    try:
        run.start(resume=resume)
        while run.epoch < epochs:
            run.train_epoch()
        run.settle(wait=True)
        return run.result()
    finally:
        run.close()


class _Run:
    """One run on one worker; the methods are its stages."""

    def __init__(
        self, task: Task, plan: Plan, world: World, *, run_dir: Path, epochs: int, seed: int
    ) -> None:
        self.task, self.plan, self.world, self.epochs, self.seed = task, plan, world, epochs, seed
        self.on_progress: Callable[[Progress], None] | None = None
        self.checkpoint_every: int | None = None
        self.directory = run_dir / checkpoint.DIRECTORY
        self.sampler = Sampler(task.train_data, task.batch_size, world, seed=seed)
        self.total_steps = epochs * self.sampler.steps_per_epoch
        self.identity = Identity(
            task=task.name,
            batch_size=task.batch_size,
            seed=seed,
            num_samples=self.sampler.num_samples,
        )
        self._stack = contextlib.ExitStack()
        self.box = BlackBox(run_dir / "blackbox" / f"rank-{world.rank}.bin")
        self._stack.callback(self.box.close)
        self.saver: Saver | None = None
        if world.rank == 0:
            self.saver = Saver(
                self.directory, self._stack.enter_context(Engine()), keep=KEEP_CHECKPOINTS
            )
        self.reader = LossReader(world)
        self.epoch = self.step_in_epoch = self.done = 0
        self.loss_sum = self.train_s = self.speed = 0.0
        self.steps: list[StepPoint] = []
        self.epoch_points: list[EpochPoint] = []
        self.exposed_s: float | None = None

    def start(self, *, resume: bool) -> None:
        """Make the model and its step, as new or from the newest checkpoint."""
        random_state.seed_all(self.seed)
        model = move(self.task.model(), self.world.device)
        optimizer = self.task.optimizer(model)
        make = self.task.scheduler
        scheduler = make(optimizer, self.total_steps) if make is not None else None
        random_state.seed_worker(self.seed, self.world.rank)
        self.trained = Trained(model=model, optimizer=optimizer, scheduler=scheduler)
        newest = checkpoint.latest(self.directory) if resume and self.world.rank == 0 else None
        found = gather_bytes(str(newest or "").encode(), self.world)[0].decode()
        if found:
            course = training_state.load(Path(found), self.trained, self.identity, self.world)
            self._take_up(course)
        self.step = TrainStep(
            model,
            self.task.loss_fn,
            optimizer,
            self.plan,
            clip_norm=self.task.clip_norm,
            device=self.world.device.type,
            name=self.task.name,
        )
        self._stack.callback(self.step.close)
        self.step.recorder.listener = self.box.frame

    def train_epoch(self) -> None:
        """Train to the end of the current epoch, evaluate, and save."""
        self.reader.start(self.done + 1)
        self._mark_s = time.perf_counter()
        loader = self.sampler.epoch(self.epoch, first_step=self.step_in_epoch)
        with contextlib.closing(
            feed(loader, self.world.device, depth=self.plan.feed.depth)
        ) as batches:
            for batch in batches:
                self._train_step(batch)
        self._read(self.reader.drain(wants_stop=self._wants_stop))
        self.box.frame("evaluate")
        metric = evaluate(
            self.trained.model,
            self.task.metric,
            self.task.test_data,
            batch_size=self.task.batch_size,
            world=self.world,
        )
        point = EpochPoint(
            epoch=self.epoch,
            step=self.done,
            metric=metric,
            mean_loss=self.loss_sum / self.sampler.steps_per_epoch,
            train_s=self.train_s,
        )
        self.epoch_points.append(point)
        self.epoch, self.step_in_epoch = self.epoch + 1, 0
        self.loss_sum = self.train_s = 0.0
        self._look_at_communication()
        self._report()
        self.save()

    def settle(self, *, wait: bool) -> None:
        """Agree on whether the last checkpoint was written; all workers raise if it was not.

        Raises:
            CheckpointError: it was not.
        """
        failure = ""
        if self.saver is not None:
            if wait:
                with contextlib.suppress(CheckpointError):  # told to all below
                    self.saver.finish()
            failure = str(self.saver.failure or "")
        text = gather_bytes(failure.encode(), self.world)[0].decode()
        if text:
            raise CheckpointError(text)

    def save(self) -> None:
        """Save the state at this step boundary; all losses must have been read.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is written.
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.settle(wait=True)
        parameters = [p.detach() for p in self.trained.model.parameters()]
        if parameters and not math.isfinite(nn.utils.get_total_norm(parameters, math.inf)):
            self._stop_non_finite(self.done, math.nan, of="parameters")
        self.box.frame("checkpoint")
        course = Course(
            position=checkpoint.Position(
                epoch=self.epoch, step_in_epoch=self.step_in_epoch, step=self.done
            ),
            loss_sum=self.loss_sum,
            train_s=self.train_s,
            steps=tuple(self.steps),
            epochs=tuple(self.epoch_points),
        )
        training_state.save(self.saver, self.trained, course, self.identity, self.plan, self.world)

    def result(self) -> TrainResult:
        """History and measured timeline."""
        history = History(
            task=self.task.name, steps=tuple(self.steps), epochs=tuple(self.epoch_points)
        )
        return TrainResult(history=history, timeline=self.step.timeline())

    def close(self) -> None:
        """Release the step, the engine and the black box."""
        self._stack.close()

    def _train_step(self, batch: Any) -> None:
        self.box.step(self.done + 1)
        loss = self.step(batch)
        if self.trained.scheduler is not None:
            self.trained.scheduler.step()
        self.reader.add(loss)
        self.done += 1
        self.step_in_epoch += 1
        is_due = self.checkpoint_every is not None and self.done % self.checkpoint_every == 0
        if is_due and self.step_in_epoch < self.sampler.steps_per_epoch:
            self._read(self.reader.drain(wants_stop=self._wants_stop))
            self.save()
            self._mark_s = time.perf_counter()
        elif self.reader.is_full:
            self._read(self.reader.take(wants_stop=self._wants_stop))

    @property
    def _wants_stop(self) -> bool:
        return self.saver is not None and self.saver.failure is not None

    def _read(self, windows: list[Window]) -> None:
        """Take note of losses; stop with all others if one is bad or somebody asked for it."""
        for window in windows:
            if window.first_bad is not None:
                step = window.first_step + window.first_bad
                self._stop_non_finite(step, window.mine[window.first_bad], of="loss")
            now = time.perf_counter()
            elapsed_s, self._mark_s = now - self._mark_s, now
            self.train_s += elapsed_s
            first = (window.first_step - 1) % self.sampler.steps_per_epoch
            samples = sum(self.sampler.samples_at(first + i) for i in range(len(window.means)))
            self.speed = samples / elapsed_s
            stride = math.ceil(self.total_steps / HISTORY_POINTS)
            for offset, mean in enumerate(window.means):
                self.loss_sum += mean
                self.loss = mean
                step = window.first_step + offset
                if step % stride == 0:
                    self.steps.append(
                        StepPoint(step=step, epoch=self.epoch, loss=mean, samples_per_s=self.speed)
                    )
            self._report()
            if window.num_stops:
                self.settle(wait=False)

    def _report(self) -> None:
        if self.on_progress is None or self.world.rank:
            return
        self.on_progress(
            Progress(
                epoch=min(self.epoch, self.epochs - 1),
                epochs=self.epochs,
                step=self.done,
                total_steps=self.total_steps,
                loss=self.loss,
                samples_per_s=self.speed,
                metric=self.epoch_points[-1].metric if self.epoch_points else None,
                exposed_s=self.exposed_s,
            )
        )

    def _look_at_communication(self) -> None:
        if self.on_progress is not None and self.world.rank == 0:
            self.exposed_s = self.step.timeline().total_ns("wait") * 1e-9

    def _take_up(self, course: Course) -> None:
        position = course.position
        self.epoch, self.step_in_epoch, self.done = (
            position.epoch,
            position.step_in_epoch,
            position.step,
        )
        self.loss_sum, self.train_s = course.loss_sum, course.train_s
        self.steps, self.epoch_points = list(course.steps), list(course.epochs)

    def _stop_non_finite(self, step: int, mine: float, *, of: str) -> None:
        """End the run on all workers, with one message that names the first cause."""
        self.step.close()  # its hooks would communicate in the diagnosis
        epoch, step_in_epoch = divmod(step - 1, self.sampler.steps_per_epoch)
        with contextlib.suppress(CheckpointError):
            if self.saver is not None:
                self.saver.finish()
        last = self.saver.last if self.saver is not None else None
        last_good = gather_bytes(str(last or "").encode(), self.world)[0].decode()
        text = ""
        if of == "parameters" or not math.isfinite(mine):
            text = explain(
                self.task,
                self.trained.model,
                self.sampler.batch(epoch, step_in_epoch),
                seed=self.seed,
                last_good=Path(last_good) if last_good else None,
                device=self.world.device,
            )
        texts = gather_bytes(text.encode(), self.world)
        rank, cause = next((r, t.decode()) for r, t in enumerate(texts) if t)
        raise NonFiniteError(
            f"wanted finite {of}, got NaN or infinity at step {step} (epoch {epoch}) on rank {rank}: "
            f"{cause}. Last good checkpoint: {last_good or 'none'}; lower the learning rate, clip the "
            "gradients (clip_norm), or mend what is named here"
        )
