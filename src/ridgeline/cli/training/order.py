"""What a training run is asked for: its arguments, with those of the run that it continues with."""

import argparse
import dataclasses
import hashlib
from collections.abc import Collection
from pathlib import Path

import msgspec

from ridgeline.cli.arguments import run_directory
from ridgeline.cli.arguments.run_directory import if_there
from ridgeline.cli.arguments.wishes import TRIES, Wishes
from ridgeline.cli.training.decision import Decision
from ridgeline.cli.training.worker import Job, RunTerms, TrainRequest
from ridgeline.decision.heartbeat import Say
from ridgeline.errors import CheckpointError, FileFormatError, PlanError, RidgelineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.synchronisation import without_named_workers
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

EPOCHS = 3


class Order(RunTerms, frozen=True, kw_only=True):
    """What is to be trained; the paths of its job are absolute.

    Attributes:
        planned: The plan with which a run is resumed.
        decided: All that it decided; None where it lost a part of that, or had another plan.
    """

    planned: Plan | None = None
    decided: Decision | None = None

    def request(self, plan: Plan, device: str) -> TrainRequest:
        """What the workers are to do."""
        terms = {name: getattr(self, name) for name in RunTerms.__struct_fields__}
        return TrainRequest(plan=plan.settings, device=device, **terms)


def order_from(
    args: argparse.Namespace, run_dir: Path, say: Say, *, workers: int | None = None
) -> Order:
    """The arguments; a resumed run keeps its own wherever one was left out.

    Args:
        args: Of `ridgeline train`.
        run_dir: Claimed for this run.
        say: Called with what a resumed run continues from.
        workers: That torchrun has started; None where they are still to be started.

    Raises:
        RidgelineError: the run directory holds a run of another task.
        CheckpointError: nothing is left to train, or an argument asks for another
            run than that which is resumed.
    """
    if args.resume:
        return _resumed(args, run_dir, say, args.workers or workers)
    task = _task_place(args.task)
    return Order(
        run_dir=str(run_dir),
        job=Job(task=task, data_dir=_place(args.data), batch_size=args.batch_size),
        epochs=args.epochs or EPOCHS,
        seed=args.seed or 0,
        resume=False,
        checkpoint_every=args.checkpoint_every,
        task_digest=_digest(task),
        allow=_sorted(args.allow),
    )


def _before(run_dir: Path) -> TrainRequest:
    """What the run was asked for, without which it cannot go on."""
    try:
        return TrainRequest.load(run_dir / run_directory.REQUEST)
    except FileFormatError as error:
        # That error advises to make the file again, which only a new run does.
        what = str(error).rpartition(";")[0]
        raise RidgelineError(
            f"wanted to read what the run in {run_dir} was asked for, got: {what}; put that file back from "
            "a copy, or start a new run with -o and "
            f"--plan {run_dir / run_directory.PLAN} (the state in {run_dir / 'checkpoints'} is as it was)"
        ) from error


def _resumed(args: argparse.Namespace, run_dir: Path, say: Say, workers: int | None) -> Order:
    before = _before(run_dir)
    task = _task_place(args.task)
    if not _is_same_place(before.job.task, task):
        raise RidgelineError(
            f"wanted to resume {args.task}, got a run of {before.job.task} in {run_dir}; name another "
            "directory with -o"
        )
    _check_unchanged(args, before, run_dir)
    job = msgspec.structs.replace(before.job, task=task)
    if args.data is not None:
        job = msgspec.structs.replace(job, data_dir=_place(args.data))
    epochs = args.epochs or before.epochs
    if run_directory.check_unfinished(run_dir, epochs, say) is None:
        say(f"no checkpoint was written in {run_dir}: starting from the beginning")
    digest = _digest(task)
    # Requests of earlier releases have no digest, which tells of no change.
    is_changed = before.task_digest is not None and digest != before.task_digest
    if is_changed:
        say(
            f"{task} has changed since the run in {run_dir} was last started: continuing with it as it is now"
        )
    plan = _plan_now(args, before.plan, workers)
    if plan.workers != before.plan.workers:
        # Only a loaded task knows its own batch size.
        batch_size = job.batch_size or job.load(before.seed).batch_size
        _check_share(batch_size, plan.workers, run_dir)
    is_same_plan = plan == before.plan.settings
    if not is_same_plan:
        say(f"continuing with {label(plan)}, where the run in {run_dir} had {label(before.plan)}")
    return Order(
        run_dir=str(run_dir),
        job=job,
        epochs=epochs,
        seed=before.seed,
        resume=True,
        checkpoint_every=args.checkpoint_every or before.checkpoint_every,
        task_digest=digest,
        # Once and for all: no single text has made such a run.
        is_task_changed=before.is_task_changed or is_changed,
        planned=plan,
        decided=_decided_before(run_dir, say) if is_same_plan else None,
        allow=before.allow,
    )


def _plan_now(args: argparse.Namespace, before: Plan, workers: int | None) -> Plan:
    """The plan with which a run is resumed: the given one, or its own with as many workers and threads.

    Checkpoints are whole, so that any plan can continue; a search would change what the run was asked for.
    """
    if args.plan is not None:
        return Plan.load(args.plan).settings
    plan = before.settings
    if args.threads is not None:
        plan = msgspec.structs.replace(plan, threads=args.threads)
    if workers in (None, plan.workers):
        return plan
    # Rings through other workers, and a layout of them, are none of these.
    sync = without_named_workers(plan.sync)
    return msgspec.structs.replace(plan, workers=workers, layout=None, sync=sync)


def _task_place(task: str) -> str:
    """A task's file from any working directory; a built-in name as it is."""
    from ridgeline.tasks.load import is_path

    return str(Path(task).absolute()) if is_path(task) else task


def _place(data_dir: str | None) -> str | None:
    """A directory from any working directory; what is none is left to the task."""
    if data_dir is None or not Path(data_dir).exists():
        return data_dir
    return str(Path(data_dir).absolute())


def _is_same_place(mine: str, its_own: str) -> bool:
    # Only text that differs is resolved: a built-in name is no path.
    return mine == its_own or Path(mine).resolve() == Path(its_own).resolve()


def _digest(task: str) -> str | None:
    """Of a task file's text; None for a built-in task."""
    from ridgeline.tasks.load import is_path

    # A file called like a built-in task is not that task's.
    path = Path(task)
    is_own = is_path(task) and path.is_file()
    return hashlib.sha256(path.read_bytes()).hexdigest() if is_own else None


def _check_unchanged(args: argparse.Namespace, before: TrainRequest, run_dir: Path) -> None:
    """A resumed run keeps its seed, batch size and data; others are refused, not left out silently."""
    wanted: list[tuple[str, object, object]] = [("--seed", args.seed, before.seed)]
    # Asked by itself, as nothing allowed is an empty list and not None.
    if args.allow:
        own_words = ", ".join(before.allow) or "nothing"
        wanted.append(("--allow", ", ".join(_sorted(args.allow)), f"{own_words} allowed"))
    if args.batch_size is not None:
        # Only a loaded task knows its own batch size.
        own = before.job.batch_size or before.job.load(before.seed).batch_size
        wanted.append(("--batch-size", args.batch_size, own))
    data_dir = before.job.data_dir
    if args.data is not None and not (data_dir and _is_same_place(args.data, data_dir)):
        wanted.append(
            ("--data", args.data, f"its data in {data_dir}" if data_dir else "the task's own data")
        )
    own_profile = run_dir / run_directory.MACHINE
    # By content, since the run has a copy under another name.
    if (
        args.machine is not None
        and own_profile.is_file()
        and Machine.load(args.machine) != Machine.load(own_profile)
    ):
        wanted.append(("--machine", str(args.machine), f"its profile in {own_profile}"))
    for option, mine, its_own in wanted:
        if mine not in (None, its_own):
            raise CheckpointError(
                f"wanted to continue the run in {run_dir}, which has {its_own}, got {option} {mine}; leave "
                "it out, or start another run with -o"
            )


def _check_share(batch_size: int, workers: int, run_dir: Path) -> None:
    """A resumed run keeps its batch size, so other workers have to share that equally."""
    if batch_size % workers:
        fitting = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
        near = [max(c for c in fitting if c < workers), *[c for c in fitting if c > workers][:1]]
        raise PlanError(
            f"wanted to continue the run in {run_dir} with workers that share its batch size {batch_size} "
            f"equally, got {workers}; use --workers {' or '.join(map(str, near))}"
        )


def wishes_from(args: argparse.Namespace) -> Wishes:
    """What the arguments fix of the plan.

    Raises:
        FileFormatError: the plan's file is no plan.
        PlanError: a plan is given, and permissions for the search as well.
    """
    if args.plan is not None and args.allow:
        raise PlanError(
            f"wanted a plan or permissions for the search of one, got --plan {args.plan} and --allow "
            f"{', '.join(args.allow)}; give one of them"
        )
    return Wishes(
        plan=Plan.load(args.plan) if args.plan is not None else None,
        workers=args.workers,
        threads=args.threads,
        machine_file=args.machine,
        tries=0 if args.no_trials else TRIES,
        allow=_sorted(args.allow),
    )


def _sorted(allow: Collection[str]) -> tuple[str, ...]:
    """Each permission once, in one order."""
    return tuple(sorted(set(allow)))


def resumed_wishes(wishes: Wishes, order: Order) -> Wishes:
    """The wishes; what a resumed run has of its decision, if anything, its plan is not searched."""
    if order.decided is not None or order.planned is None:
        return wishes
    return dataclasses.replace(wishes, plan=order.planned)


def _decided_before(run_dir: Path, say: Say) -> Decision | None:
    """What the run in a directory decided; None where a part of that is missing."""
    names = (run_directory.MACHINE, run_directory.WORKLOAD, run_directory.PLAN)
    places = [run_dir / name for name in (*names, run_directory.PREDICTED)]
    missing = [path.name for path in places if not path.is_file()]
    if missing:
        say(f"no {', '.join(missing)} in {run_dir}: predicting the plan of that run again")
        return None
    machine, workload, plan, prediction = places
    predicted = Timeline.load(prediction)
    return Decision(
        machine=Machine.load(machine),
        workload=Workload.load(workload),
        plan=Plan.load(plan),
        predicted=predicted,
        expected=if_there(Timeline, run_dir / run_directory.EXPECTED) or predicted,
    )
