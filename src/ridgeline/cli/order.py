"""What a training run is asked for: its arguments, with those of the run that it goes on with."""

import argparse
from pathlib import Path

import msgspec

from ridgeline.cli import run_directory
from ridgeline.cli.decision import TRIES, Decision, Say, Wishes
from ridgeline.cli.worker import Job, TrainRequest
from ridgeline.codec import Value
from ridgeline.errors import CheckpointError, RidgelineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

EPOCHS = 3


class Order(Value, frozen=True, kw_only=True):
    """What is to be trained, whatever the plan; `decided` is what a resumed run decided before."""

    run_dir: str
    job: Job
    epochs: int
    seed: int
    resume: bool
    checkpoint_every: int | None
    decided: Decision | None = None

    def request(self, plan: Plan, device: str) -> TrainRequest:
        """What the workers are to do."""
        return TrainRequest(
            job=self.job,
            plan=plan.settings,
            device=device,
            run_dir=self.run_dir,
            epochs=self.epochs,
            seed=self.seed,
            resume=self.resume,
            checkpoint_every=self.checkpoint_every,
        )


def order_from(args: argparse.Namespace, run_dir: Path, say: Say) -> Order:
    """The arguments; a resumed run keeps its own wherever one was left out.

    Args:
        args: Of `ridgeline train`.
        run_dir: Claimed for this run.
        say: Told when there is nothing yet to resume from.

    Raises:
        RidgelineError: the run directory holds a run of another task.
        CheckpointError: nothing is left to train, or an argument asks for another
            run than that which is resumed.
    """
    before: TrainRequest | None = None
    if args.resume:
        before = TrainRequest.load(run_dir / run_directory.REQUEST)
        if before.job.task != args.task:
            raise RidgelineError(
                f"wanted to resume {args.task}, got a run of {before.job.task} in {run_dir}; name another "
                "directory with -o"
            )
        _check_unchanged(args, before, run_dir)
    job = before.job if before is not None else Job(task=args.task)
    if args.data is not None:
        job = msgspec.structs.replace(job, data_dir=args.data)
    if args.batch_size is not None:
        job = msgspec.structs.replace(job, batch_size=args.batch_size)
    epochs = args.epochs or (before.epochs if before is not None else EPOCHS)
    seed = before.seed if before is not None else 0
    every = before.checkpoint_every if before is not None else None
    if args.resume and run_directory.check_unfinished(run_dir, epochs) is None:
        say(f"no checkpoint was written in {run_dir}: starting from the beginning")
    return Order(
        run_dir=str(run_dir),
        job=job,
        epochs=epochs,
        seed=seed if args.seed is None else args.seed,
        resume=args.resume,
        checkpoint_every=args.checkpoint_every or every,
        decided=decided_before(run_dir) if args.resume else None,
    )


def _check_unchanged(args: argparse.Namespace, before: TrainRequest, run_dir: Path) -> None:
    """A resumed run keeps its plan, seed and batch size; other ones are refused, not left out silently."""
    plan = before.plan
    wanted: list[tuple[str, object, object]] = [
        ("--seed", args.seed, before.seed),
        ("--workers", args.workers, plan.workers),
        ("--threads", args.threads, plan.threads),
    ]
    if args.batch_size is not None:
        own = before.job.batch_size or before.job.load(before.seed).batch_size
        wanted.append(("--batch-size", args.batch_size, own))
    if args.plan is not None:
        wanted.append(("--plan", repr(Plan.load(args.plan).settings), repr(plan.settings)))
    own_profile = run_dir / run_directory.MACHINE
    if args.machine is not None and Machine.load(args.machine) != Machine.load(own_profile):
        wanted.append(("--machine", str(args.machine), f"its profile in {own_profile}"))
    for option, mine, its_own in wanted:
        if mine not in (None, its_own):
            raise CheckpointError(
                f"wanted to go on with the run in {run_dir}, which has {its_own}, got {option} {mine}; leave "
                "it out, or start another run with -o"
            )


def wishes_from(args: argparse.Namespace) -> Wishes:
    """What the arguments fix of the plan.

    Raises:
        FileFormatError: the plan's file is no plan.
    """
    return Wishes(
        plan=Plan.load(args.plan) if args.plan is not None else None,
        workers=args.workers,
        threads=args.threads,
        machine_file=args.machine,
        tries=0 if args.no_trials else TRIES,
    )


def decided_before(run_dir: Path) -> Decision | None:
    """What the run in a directory decided; None if it did not come that far."""
    names = (
        run_directory.MACHINE,
        run_directory.WORKLOAD,
        run_directory.PLAN,
        run_directory.PREDICTED,
    )
    if not all((run_dir / name).is_file() for name in names):
        return None
    return Decision(
        machine=Machine.load(run_dir / run_directory.MACHINE),
        workload=Workload.load(run_dir / run_directory.WORKLOAD),
        plan=Plan.load(run_dir / run_directory.PLAN),
        predicted=Timeline.load(run_dir / run_directory.PREDICTED),
    )
