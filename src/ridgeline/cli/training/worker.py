"""The worker processes of `ridgeline train`, and the trial runs of its search.

    python -m ridgeline.cli.training.worker REQUEST.json PARENT_PID

is started once per worker by torch's elastic agent. Imports that take time come after the process has
tied itself to its parent and opened its log.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ridgeline.cli.arguments import run_directory
from ridgeline.codec import Noun, Value
from ridgeline.history import History
from ridgeline.plan import Plan
from ridgeline.recording.progress import Progress
from ridgeline.workers import worker_process

if TYPE_CHECKING:
    from ridgeline.runtime.training.task import Task
    from ridgeline.workers.world import World

PROGRESS_FILE = "progress.jsonl"
MOST_PHASES_S = 60.0
"""For all steps whose phases are timed, which were not thought to be long."""


class Job(Value, frozen=True, kw_only=True):
    """Which task: its name or file, where its data is, and the global batch size (None: its own)."""

    task: str
    data_dir: str | None = None
    batch_size: int | None = None

    def load(self, seed: int) -> "Task":
        """The task, made after every generator was seeded: all workers make the same data.

        Raises:
            TaskError: see `load_task`.
            DataError: its data is missing or damaged.
        """
        from ridgeline.state.random_state import seed_all
        from ridgeline.tasks import load_task

        seed_all(seed)
        return load_task(self.task, data_dir=self.data_dir, batch_size=self.batch_size)


class RunTerms(Noun, frozen=True, kw_only=True):
    """What a run is asked for, whatever its plan.

    Attributes:
        job: Which task.
        run_dir: Gets all files; it is claimed for this run.
        epochs: In all.
        seed: Of everything random.
        resume: Continue from the newest checkpoint.
        checkpoint_every: Steps.
        task_digest: SHA-256 of the task file's text; None for a built-in task.
        is_task_changed: That text has changed between the starts of this run.
        allow: Changes of the maths that the choice of the plan may make.
    """

    job: Job
    run_dir: str
    epochs: int
    seed: int
    resume: bool
    checkpoint_every: int | None = None
    task_digest: str | None = None
    is_task_changed: bool = False
    allow: tuple[str, ...] = ()


class TrainRequest(RunTerms, frozen=True, kw_only=True):
    """What the workers of a run are to do; `request.json` in the run directory.

    Attributes:
        plan: Without its reasons.
        device: `cpu` or `cuda`.
    """

    kind: ClassVar[str] = "train-request"

    plan: Plan
    device: str


class TrialRequest(Value, frozen=True, kw_only=True):
    """A plan to try on a task for some steps."""

    job: Job
    plan: Plan
    device: str
    seed: int


def answered(target: str, request: TrialRequest, *, deadline_s: float = 300.0) -> bytes:
    """What as many workers as the plan has reply to a request; `target` is a function below."""
    from ridgeline.probe.groups.group import run_in_group

    return run_in_group(
        target,
        msgspec.json.encode(request),
        workers=request.plan.workers,
        threads=request.plan.threads,
        device=request.device,
        deadline_s=deadline_s,
    )


def trial(request: bytes) -> bytes:
    """Try a plan in this group of workers; the measured timeline as JSON (target of `run_in_group`)."""
    from ridgeline.runtime.training.plan_trial import try_plan
    from ridgeline.workers.world import World

    asked = msgspec.json.decode(request, type=TrialRequest)
    world = World.join(threads=asked.plan.threads, device=asked.device)
    return msgspec.json.encode(
        try_plan(asked.job.load(asked.seed), asked.plan, world, seed=asked.seed)
    )


def phases(request: bytes) -> bytes:
    """Time a step of each worker of this group, as JSON (target of `run_in_group`)."""
    from ridgeline.workers.world import World

    asked = msgspec.json.decode(request, type=TrialRequest)
    world = World.join(threads=asked.plan.threads, device=asked.device)
    return msgspec.json.encode(phases_in_group(asked.job.load(asked.seed), world, seed=asked.seed))


def phases_in_group(task: "Task", world: "World", *, seed: int) -> dict[str, float]:
    """The seconds of each phase, by all workers of a group, which call this together.

    Raises:
        RidgelineError: the step fails, or takes too long.
    """
    from ridgeline.decision.whole_step import phase_seconds
    from ridgeline.runtime.steps.step import PlannedStep, move
    from ridgeline.runtime.training.plan_trial import batches_of
    from ridgeline.state.random_state import seed_all
    from ridgeline.workers.world import World as Place

    seed_all(seed)
    model = move(task.model(), world.device)
    (batch,) = batches_of(task, world, seed=seed).some(1, 1)
    with PlannedStep(
        model,
        task.loss_fn,
        task.optimizer(model),
        # Each by itself, though all at once: exchanges are none of the operators that it is held against.
        Plan(workers=1, threads=world.threads),
        clip_norm=task.clip_norm,
        world=Place(0, 1, world.local_rank, world.device),
        name=task.name,
        is_undone=True,
    ) as step:
        return phase_seconds(step, batch, world, MOST_PHASES_S)


def work(
    request: TrainRequest,
    on_progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> History:
    """Train on this worker; rank 0 writes history and measured timeline into the run directory.

    The request of a resumed run becomes that of the run once its checkpoint was taken up, not before: a
    refused one must not stand in the way of the next.

    Raises:
        RidgelineError: see `ridgeline.runtime.training.loop.train`.
    """
    from ridgeline.runtime.training.loop import train
    from ridgeline.workers.world import World

    world = World.join(threads=request.plan.threads, device=request.device)
    run_dir = Path(request.run_dir)

    def accept() -> None:
        if world.rank == 0 and request.resume:
            request.save(run_dir / run_directory.REQUEST)

    result = train(
        request.job.load(request.seed),
        request.plan,
        world,
        run_dir=run_dir,
        epochs=request.epochs,
        seed=request.seed,
        resume=request.resume,
        checkpoint_every=request.checkpoint_every,
        on_start=accept,
        on_progress=on_progress,
        say=say,
    )
    if world.rank == 0:
        # By rank 0 alone: the others may be on hosts that do not see the directory.
        result.history.save(run_dir / run_directory.HISTORY)
        # Nothing was timed where the run that is resumed had been killed after its last step.
        if result.timeline.step_ns > 0:
            result.timeline.save(run_dir / run_directory.MEASURED)
    return result.history


def main(arguments: list[str]) -> None:
    """Entry of a worker process: the request's file and the parent's process id."""
    path, parent = arguments
    # Before any import that takes time: the parent may die meanwhile, and leave an orphan.
    worker_process.end_with_parent(int(parent))
    request = TrainRequest.load(path)
    run_dir, rank = Path(request.run_dir), int(os.environ["RANK"])
    worker_process.redirect_output(worker_process.log_path(run_dir, rank))
    with worker_process.last_words(run_dir, rank):
        # Unbuffered, so that the parent reads whole lines even of a worker that dies.
        with (run_dir / worker_process.LOGS / PROGRESS_FILE).open("ab", buffering=0) as progress:

            def append(point: Progress) -> None:
                progress.write(msgspec.json.encode(point) + b"\n")

            work(request, append, _log)
        from ridgeline.workers.world import World

        World.leave()


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
    worker_process.end_well()
