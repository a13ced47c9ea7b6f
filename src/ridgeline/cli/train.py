"""`ridgeline train`: the whole loop. Measure, trace, choose, train, verify, report.

Started by hand it launches the workers itself; under torchrun every process runs it, and rank 0 alone
shows and writes.
"""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.text import Text

from ridgeline import units
from ridgeline.cli import run_directory
from ridgeline.cli.claim import claimed
from ridgeline.cli.command import FINE, Output
from ridgeline.cli.decision import Decision, decide
from ridgeline.cli.drift import with_drift, with_stale_profile
from ridgeline.cli.inputs import (
    add_allow_argument,
    add_machine_argument,
    add_task_arguments,
    positive,
    seed,
)
from ridgeline.cli.order import EPOCHS, Order, order_from, resumed_wishes, wishes_from
from ridgeline.cli.report import PAGE_NAME, write_report
from ridgeline.cli.watch import Watch
from ridgeline.cli.worker import TrainRequest
from ridgeline.history import History, metric_text
from ridgeline.planner.labels import label
from ridgeline.reporting.outages import outages_text
from ridgeline.reporting.text import ranking_text, title
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify

if TYPE_CHECKING:
    from ridgeline.runtime.task import Task


class TrainCommand:
    """Measure this machine, trace the task, choose a plan, train, verify the prediction, and report."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        add_task_arguments(parser)
        run = parser.add_argument_group("run")
        run.add_argument(
            "--epochs", type=positive, metavar="N", help=f"passes over the data (default {EPOCHS})"
        )
        run.add_argument("--seed", type=seed, metavar="N", help="of everything random (default 0)")
        run.add_argument(
            "-o",
            "--output",
            type=Path,
            metavar="RUN_DIR",
            help="run directory (default runs/TASK-DATE-N)",
        )
        run.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
        run.add_argument(
            "--checkpoint-every",
            type=positive,
            metavar="N",
            help="also save every N steps (default: epochs)",
        )
        plan = parser.add_argument_group("plan")
        plan.add_argument(
            "--workers", type=positive, metavar="N", help="number of workers (default: chosen)"
        )
        plan.add_argument("--threads", type=positive, metavar="N", help="CPU threads per worker")
        plan.add_argument(
            "--plan", type=Path, metavar="FILE", help="use this plan; nothing is searched"
        )
        plan.add_argument(
            "--no-trials", action="store_true", help="trust the predictions, try nothing"
        )
        add_allow_argument(plan)
        add_machine_argument(parser)

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Close the loop around one training run."""
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            from ridgeline.cli.train_in_group import train_in_group

            return train_in_group(args, output)
        with claimed(args.task, args.output, resume=args.resume) as run_dir:
            return _train(args, run_dir, output)


def _train(args: argparse.Namespace, run_dir: Path, output: Output) -> int:
    """Close the loop around one training run in worker processes of this host."""
    from ridgeline.runtime.launch import check_plan

    order = order_from(args, run_dir, output.progress)
    wishes = wishes_from(args)
    if wishes.plan is not None:
        check_plan(wishes.plan)
    task = order.job.load(order.seed)
    decision = order.decided or decide(
        task,
        order.job,
        resumed_wishes(wishes, order),
        seed=order.seed,
        steps=num_steps(task, order.epochs, workers=wishes.workers or 1),
        say=output.progress,
    )
    check_plan(decision.plan, decision.workload.device)
    request = prepare(order, decision, output)
    _launch(run_dir, request, decision, output)
    return conclude(run_dir, task.name, decision, output)


def num_steps(task: "Task", epochs: int, *, workers: int = 1) -> int:
    """Steps of a whole run, as training counts them with so many workers.

    Raises:
        DataError: the training data is empty or has no length.
    """
    from ridgeline.runtime import sampler

    count = sampler.length(task.train_data, "training data")
    each = sampler.num_steps(count, batch_size=task.batch_size, workers=workers)
    return max(1, each * epochs)


def prepare(order: Order, decision: Decision, output: Output) -> Path:
    """Write down what was decided and what the workers are to do, and show the plan.

    Returns:
        The workers' request. That of a resumed run lies beside the one before until it was taken up.

    Raises:
        OSError: the run directory cannot be written.
    """
    run_dir = Path(order.run_dir)
    decision.machine.save(run_dir / run_directory.MACHINE)
    decision.workload.save(run_dir / run_directory.WORKLOAD)
    decision.plan.save(run_dir / run_directory.PLAN)
    decision.predicted.save(run_dir / run_directory.PREDICTED)
    decision.expected.save(run_dir / run_directory.EXPECTED)
    if decision.ranking is not None:
        decision.ranking.save(run_dir / run_directory.RANKING)
        if not output.is_json:
            output.result({}, ranking_text(decision.ranking))
    name = run_directory.PENDING if order.resume else run_directory.REQUEST
    request = order.request(decision.plan, decision.workload.device).save(run_dir / name)
    output.progress(f"training with {label(decision.plan)} into {run_dir}")
    return request


def _launch(run_dir: Path, request: Path, decision: Decision, output: Output) -> None:
    """Train in worker processes of this host."""
    from ridgeline.runtime.launch import launch

    with Watch(output, limit_samples_per_s=limit_samples_per_s(decision)) as watch:
        launch(
            "ridgeline.cli.worker",
            request,
            workers=decision.plan.workers,
            threads=decision.plan.threads,
            run_dir=run_dir,
            on_line=watch.line,
        )


def limit_samples_per_s(decision: Decision) -> float | None:
    """Samples per second at the physical limit of the step, over all workers."""
    ideal = verify(
        decision.predicted, decision.predicted, machine=decision.machine, workload=decision.workload
    )
    if not ideal.share_of_ceiling:
        return None
    limit_s = ideal.share_of_ceiling * ideal.measured_ns * 1e-9
    return decision.workload.samples * decision.plan.workers / limit_s


def conclude(run_dir: Path, task: str, decision: Decision, output: Output) -> int:
    """Verify, report, and show how it went; a missed prediction is reported, not punished."""
    if not (run_dir / run_directory.MEASURED).is_file():
        return _conclude_unmeasured(run_dir, task, output)
    trial = decision.ranking.best.measured if decision.ranking else None
    measured = with_drift(Timeline.load(run_dir / run_directory.MEASURED), trial)
    measured = with_stale_profile(measured, trial, decision.predicted)
    measured = _with_changed_task(measured, TrainRequest.load(run_dir / run_directory.REQUEST))
    measured.save(run_dir / run_directory.MEASURED)
    history = History.load(run_dir / run_directory.HISTORY)
    verdict = verify(
        decision.predicted,
        measured,
        expected=decision.expected,
        machine=decision.machine,
        workload=decision.workload,
    )
    verdict.save(run_dir / run_directory.VERDICT)
    write_report(run_dir)
    page = run_dir / PAGE_NAME
    overhead_ns = measured.counters.get("overhead_ns")
    output.result(
        {
            "run_dir": str(run_dir),
            "task": task,
            "metric": history.epochs[-1].metric,
            "predicted_ns": verdict.predicted_ns,
            "measured_ns": verdict.measured_ns,
            "expected_ns": decision.expected.step_ns,
            "error": verdict.error,
            "error_before": verdict.error_before,
            "overhead_ns": overhead_ns,
            "report": str(page),
        },
        *_summary(task, history, verdict, overhead_ns, page),
    )
    return FINE


def _conclude_unmeasured(run_dir: Path, task: str, output: Output) -> int:
    """Report a run that was killed after its last step, with what was measured of its steps."""
    history = History.load(run_dir / run_directory.HISTORY)
    write_report(run_dir)
    page = run_dir / PAGE_NAME
    metric = history.epochs[-1].metric
    output.result(
        {"run_dir": str(run_dir), "task": task, "metric": metric, "report": str(page)},
        _done(task, history),
        *outages_text(history),
        Text(
            "no verdict: the run was killed after its last step, before it wrote down what that took"
        ),
        Text(f"report: {page}"),
    )
    return FINE


def _with_changed_task(measured: Timeline, request: TrainRequest) -> Timeline:
    """The measured timeline, with a note when no single text of the task file made the run."""
    if not request.is_task_changed:
        return measured
    note = f"{request.job.task} was changed before the run was resumed: its parts were trained by other code"
    return msgspec.structs.replace(measured, notes=(note, *measured.notes))


def _summary(
    task: str, history: History, verdict: Verdict, overhead_ns: float | None, page: Path
) -> list[RenderableType]:
    overhead = "not measured" if overhead_ns is None else f"{units.nanoseconds(overhead_ns)} a step"
    if verdict.hides_overhead:
        overhead += " on the host, hidden behind the device"
    return [
        _done(task, history),
        Panel(Text(verdict.text), box=box.ROUNDED, expand=False),
        *outages_text(history),
        Text(verdict.outlook),
        Text(f"Ridgeline's own time: {overhead}"),
        Text(f"report: {page}"),
    ]


def _done(task: str, history: History) -> RenderableType:
    """The headline of a run."""
    last = history.epochs[-1]
    metric = metric_text(last.metric, (point.metric for point in history.epochs))
    done = last.epoch + 1
    return title(task, f"test metric {metric} after {done} epoch{'s' * (done > 1)}")
