"""`ridgeline train`: the whole loop. Measure, trace, choose, train, verify, report.

Started by hand it launches the workers itself; under torchrun every process runs it, and rank 0 alone
shows and writes.
"""

import argparse
import os
from pathlib import Path

from ridgeline.cli.arguments.claim import claimed
from ridgeline.cli.arguments.flags import (
    add_allow_argument,
    add_machine_argument,
    add_task_arguments,
    positive,
    seed,
)
from ridgeline.cli.command import Output
from ridgeline.cli.train_in_group import train_in_group
from ridgeline.cli.training.decision import decide
from ridgeline.cli.training.order import EPOCHS, order_from, resumed_wishes, wishes_from
from ridgeline.cli.training.training_run import conclude, limit_samples_per_s, num_steps, prepare
from ridgeline.cli.training.watch import Watch


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
        run.add_argument("--resume", action="store_true", help="continue from the last checkpoint")
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
            return train_in_group(args, output)
        with claimed(args.task, args.output, resume=args.resume) as run_dir:
            return _train(args, run_dir, output)


def _train(args: argparse.Namespace, run_dir: Path, output: Output) -> int:
    """Close the loop around one training run in worker processes of this host."""
    from ridgeline.runtime.training.launch import check_plan, launch

    order = order_from(args, run_dir, output.progress)
    wishes = wishes_from(args)
    # Before minutes of measuring; below once more, for the device that was found.
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
    with Watch(output, limit_samples_per_s=limit_samples_per_s(decision)) as watch:
        launch(
            "ridgeline.cli.training.worker",
            request,
            workers=decision.plan.workers,
            threads=decision.plan.threads,
            run_dir=run_dir,
            on_line=watch.line,
        )
    return conclude(run_dir, task.name, decision, output)
