"""The training loop: epochs of steps, evaluation, checkpoints, and a clean end in every case.

All workers run it side by side. They meet at the readings of the loss (see `readings`), where they
decide together whether to stop; so a NaN or a full disk ends every worker with the same message, and
none is left waiting.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError, NonFiniteError, PlanError
from ridgeline.feeding import Handover, feed
from ridgeline.history import History, Outage
from ridgeline.plan import Plan
from ridgeline.recording.progress import Progress
from ridgeline.runtime.checkpoints import checkpoint_directory
from ridgeline.runtime.checkpoints.as_made import as_made
from ridgeline.runtime.checkpoints.checkpointing import take_own
from ridgeline.runtime.checkpoints.staging import Staging
from ridgeline.runtime.checkpoints.unsaved import Unsaved, unsaved_note
from ridgeline.runtime.layout.initial_state import take_buffers
from ridgeline.runtime.layout.ownership import writes_checkpoint
from ridgeline.runtime.steps.step import PlannedStep, move
from ridgeline.runtime.training import schedule, training_state
from ridgeline.runtime.training.diagnose import largest_magnitude
from ridgeline.runtime.training.evaluate import evaluate
from ridgeline.runtime.training.journal import Journal
from ridgeline.runtime.training.non_finite import explain, explained, first_cause
from ridgeline.runtime.training.readings import LossReader, Window
from ridgeline.runtime.training.round import Round
from ridgeline.runtime.training.sampler import Sampler
from ridgeline.runtime.training.saver import Saver
from ridgeline.runtime.training.task import Task
from ridgeline.runtime.training.training_state import Identity, Resumed, Trained
from ridgeline.state import random_state
from ridgeline.timeline import Timeline
from ridgeline.workers.agree import gather_bytes, largest_of_workers, share_text
from ridgeline.workers.blackbox import BlackBox
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import JOIN, World

KEEP_CHECKPOINTS = 3
"""Newest checkpoints kept: the last, and two to go back to when it is damaged or diverging."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """The result of a run: its history, and the timeline of this worker's last steps."""

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
    on_start: Callable[[], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> TrainResult:
    """Train a task under a plan; every worker calls this alike.

    Rank 0 continues with the random numbers that making the model left, the other workers with their
    own. On the CPU a resumed run has bitwise the losses of one that was never stopped, but for the rounding
    by which a step as one program differs from the step as written, the first one after each start.

    Args:
        task: What to train.
        plan: How; `plan.workers` must be the size of the world.
        world: This worker's place.
        run_dir: Gets `checkpoints/` and `blackbox/`.
        epochs: Passes over the training data, in all.
        seed: Of the model, the order of the data, and everything random.
        resume: Go on from the newest whole checkpoint in `run_dir`, if one was ever completed.
        checkpoint_every: Steps between checkpoints, beside those at the end of every epoch.
        on_start: Called once the model and its step are there, with what was resumed.
        on_progress: Called on rank 0 at every reading.
        say: Told on rank 0 which checkpoint is taken up, and why newer ones are not.

    Raises:
        PlanError: the plan asks for what this release or this world does not offer, or the world joins a
            training that runs.
        NonFiniteError: the loss became NaN or infinite; on all workers.
        CheckpointError: a checkpoint could not be written, or there are some to resume from but none is
            whole; on all workers.
        DataError: the data set is empty.
        TaskError: the task's scheduler cannot be stepped after every training step.
    """
    if world.joins:  # its workers agree at each reading, by collectives
        raise PlanError(
            f"wanted no {JOIN} for a run of a task, whose workers are all there from the beginning, got "
            f"{world.joins!r}; unset it, or join from a script with rl.TrainStep"
        )
    run = _Run(task, plan, world, run_dir=run_dir, epochs=epochs, seed=seed)
    run.on_progress = on_progress
    run.say = say or run.say
    run.checkpoint_every = checkpoint_every
    try:
        run.start(resume=resume)
        if on_start is not None:
            on_start()
        while run.journal.epoch < epochs:
            run.train_epoch()
        run.settle(wait=True)
        return TrainResult(history=run.journal.history(), timeline=run.step.timeline())
    except BaseException as error:  # Ctrl-C, too
        run.note_unsaved(error)
        raise
    finally:
        run.close()


class _Run:
    """One run on one worker; the methods are its stages."""

    def __init__(
        self, task: Task, plan: Plan, world: World, *, run_dir: Path, epochs: int, seed: int
    ) -> None:
        self.task, self.plan, self.world, self.seed = task, plan, world, seed
        self.on_progress: Callable[[Progress], None] | None = None
        self.say: Callable[[str], None] = lambda _: None
        self.checkpoint_every: int | None = None
        self.directory = run_dir / checkpoint_directory.NAME
        self.sampler = Sampler(task.train_data, task.batch_size, world, seed=seed)
        self.journal = Journal(task.name, self.sampler, epochs)
        self.identity = Identity(
            task=task.name,
            batch_size=task.batch_size,
            seed=seed,
            num_samples=self.sampler.num_samples,
        )
        self.reader = LossReader(world)
        self.handover = Handover()
        self._buffers: FlatBuffers | None = None
        self._unsaved: Unsaved | None = None
        self._looks_for_unsaved = True
        self._stack = contextlib.ExitStack()
        self.box = BlackBox(run_dir / "blackbox" / f"rank-{world.rank}.bin")
        # First on the stack and so closed last: frames are noted until everything else has ended.
        self._stack.callback(self.box.close)
        self.saver: Saver | None = None
        if writes_checkpoint(world):
            # Below the engine on the stack: its disk lane reads from this memory until it ends.
            staging = Staging()
            self._stack.callback(staging.close)
            engine = self._stack.enter_context(Engine())
            self.saver = Saver(self.directory, engine, staging, keep=KEEP_CHECKPOINTS)

    def start(self, *, resume: bool) -> None:
        """Make the model and its step, either new or from the newest checkpoint."""
        random_state.seed_all(self.seed)
        model = move(self.task.model(), self.world.device)
        optimizer = self.task.optimizer(model)
        scheduler = schedule.make(self.task, optimizer, self.journal.total_steps)
        # Behind the model, which all workers make with the same numbers.
        random_state.seed_worker(self.seed, self.world.rank)
        self.trained = Trained(
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            total_steps=self.journal.total_steps,
            made=as_made(model, optimizer),
        )
        # Before the step is made: it takes model and optimizer as they are then, and shares them.
        resumed = self._take_up() if resume else None
        self.step = PlannedStep(
            model,
            self.task.loss_fn,
            optimizer,
            self.plan,
            clip_norm=self.task.clip_norm,
            device=self.world.device.type,
            process_group=self.world.process_group,
            name=self.task.name,
        )
        self._stack.callback(self.step.close)
        synchronizer = self.step.synchronizer
        if synchronizer is not None and not synchronizer.trains_apart:
            self._buffers = FlatBuffers(model)
        if synchronizer is not None and resumed is not None:
            if synchronizer.trains_apart:  # the step has given all workers what the first one has
                take_own(resumed.own, resumed.own_tensors, model, optimizer)
            if resumed.order:
                synchronizer.take_order(resumed.order)
            if resumed.remembered:
                synchronizer.load_state_dict(resumed.remembered)
        self.round = Round(self.step, self.reader, self.box, scheduler)

    def _take_up(self) -> Resumed | None:
        """Resume from the newest intact checkpoint, if there is one."""
        resumed = training_state.load(
            self.directory, self.trained, self.identity, self.plan, self.world
        )
        if resumed is None:
            return None
        self.journal.take_up(resumed.course)
        if self.saver is not None and resumed.found is not None:
            self.saver.take_up(resumed.found.path, resumed.found.skipped)
            for line in resumed.found.lines:
                self.say(line)
        return resumed

    def train_epoch(self) -> None:
        """Train to the end of the current epoch, evaluate, and save."""
        journal = self.journal
        loader = self.sampler.epoch(journal.epoch, first_step=journal.step_in_epoch)
        self.reader.start(journal.step + 1)
        journal.restart_clock()
        # Closed in any case, so that an error leaves no loading thread behind.
        with feed(
            loader, self.world.device, depth=self.plan.feed.depth, handover=self.handover
        ) as batches:
            for batch in batches:
                self._train_step(batch)
        self._read(self.reader.drain(wants_stop=self._wants_stop))
        # Updates that the plan holds back belong to this epoch, and so to its metric.
        self.step.wait()
        self.box.frame("evaluate")
        metric = evaluate(
            self.trained.model,
            self.task.metric,
            self.task.test_data,
            batch_size=self.task.batch_size,
            world=self.world,
        )
        self._share_buffers()
        journal.end_epoch(metric)
        if self.on_progress is not None and self.world.rank == 0:
            journal.exposed_s = self.step.timeline().total_ns("wait") * 1e-9
        self._report()
        self.save()

    def _share_buffers(self) -> None:
        """Have all continue with the first worker's buffers, of which there is one copy in checkpoints.

        A model may write some in evaluation, too (quantiles of what it sees), each worker by its own samples.
        """
        if self._buffers is not None:
            take_buffers(self._buffers, self.world, "data")

    def save(self) -> None:
        """Save the state at this step boundary; all losses must have been read.

        Raises:
            NonFiniteError: a parameter is not finite; nothing is written.
            CheckpointError: the checkpoint before this one could not be written.
        """
        self.step.wait()
        self.settle(wait=True)
        largest = largest_magnitude(self.trained.model.parameters())
        # Workers may hold different parameters: all stop for one of them.
        if largest_of_workers(float(not math.isfinite(largest)), self.world):
            self._stop_non_finite(self.journal.step, largest, of="parameters")
        self._tell_unsaved()
        self.box.frame("checkpoint")
        if self.step.outages is not None:
            mine = msgspec.json.encode(self.step.outages())
            told = gather_bytes(mine, self.world)
            found = [msgspec.json.decode(one, type=tuple[Outage, ...]) for one in told]
            self.journal.note_outages([outage for one in found for outage in one])
        training_state.save(
            self.saver,
            self.trained,
            self.journal.course(),
            self.identity,
            self.plan,
            self.world,
            self.step.synchronizer,
        )

    def _tell_unsaved(self) -> None:
        """Say once what a checkpoint leaves out of what the steps since the first one have changed."""
        if self._unsaved is not None and (names := self._unsaved.changed()):
            self.say(unsaved_note(names))
            self._unsaved = None

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
        if text := share_text(failure, self.world):
            raise CheckpointError(text)

    def note_unsaved(self, error: BaseException) -> None:
        """Wait for the checkpoint being written; its failure is noted on the error that ends the run."""
        if self.saver is None:
            return
        with contextlib.suppress(CheckpointError):
            self.saver.finish()
        failure = self.saver.failure
        if failure is not None and str(failure) != str(error):
            error.add_note(str(failure))

    def close(self) -> None:
        """Release the step, the engine and the black box."""
        self._stack.close()

    def _train_step(self, batch: Any) -> None:
        journal = self.journal
        self.round(batch, journal.step + 1)
        journal.count()
        if self._looks_for_unsaved and self.saver is not None:
            # Behind the first step, in which code fills what it keeps for all others.
            self._unsaved = Unsaved(self.trained.model, self.task.loss_fn, self.trained.optimizer)
        self._looks_for_unsaved = False
        is_due = self.checkpoint_every is not None and journal.step % self.checkpoint_every == 0
        # The last step of an epoch is saved in any case, behind the evaluation.
        if is_due and journal.step_in_epoch < self.sampler.steps_per_epoch:
            # Losses first: their sum goes into the checkpoint, and none may be written behind a bad one.
            self._read(self.reader.drain(wants_stop=self._wants_stop))
            self.save()
            journal.restart_clock()
        elif self.reader.is_full:
            self._read(self.reader.take(wants_stop=self._wants_stop))

    @property
    def _wants_stop(self) -> bool:
        return self.saver is not None and self.saver.failure is not None

    def _read(self, windows: list[Window]) -> None:
        """Record losses; stop together with all workers if one is bad or a stop was requested."""
        for window in windows:
            if window.first_bad is not None:
                step = window.first_step + window.first_bad
                self._stop_non_finite(step, window.mine[window.first_bad], of="loss")
        if windows:
            self.journal.note(windows)
            self._report()
        if any(window.num_stops for window in windows):
            self.settle(wait=False)

    def _report(self) -> None:
        if self.on_progress is not None and self.world.rank == 0:
            self.on_progress(self.journal.progress())

    def _stop_non_finite(self, step: int, mine: float, *, of: str) -> None:
        """End the run on all workers, with one message that names the first cause."""
        self.step.close()  # its hooks would communicate in the diagnosis
        epoch, step_in_epoch = self.journal.place(step)
        last: Path | None = None
        if self.saver is not None:
            with contextlib.suppress(CheckpointError):  # the bad loss is the news
                self.saver.finish()
            last = self.saver.last
        last_good = share_text(str(last or ""), self.world)
        text = ""
        if not math.isfinite(mine):
            text = explained(
                lambda: explain(
                    self.task,
                    self.trained.model,
                    self.sampler.batch(epoch, step_in_epoch),
                    seed=self.seed,
                    last_good=Path(last_good) if Path(last_good, "model").is_dir() else None,
                    device=self.world.device,
                    precision=self.plan.precision,
                )
            )
        texts = [told.decode() for told in gather_bytes(text.encode(), self.world)]
        # One at least has a text: a mean is not finite only where some worker's loss is not.
        place, cause = first_cause(texts)
        rank = self.world.ranks()[place]
        raise NonFiniteError(
            f"wanted finite {of}, got NaN or infinity at step {step} (epoch {epoch}) on rank {rank}: "
            f"{cause}. Last good checkpoint: {last_good or 'none'}; clip the gradients (clip_norm) or fix "
            "what is named here, and continue with --resume, or lower the learning rate, for which a run has "
            "to begin anew in another directory"
        )
