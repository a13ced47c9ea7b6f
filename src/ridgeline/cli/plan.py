"""`ridgeline plan`: which way to run a training step, and why."""

import argparse

from ridgeline.cli.arguments.flags import (
    add_allow_argument,
    add_machine_argument,
    add_task_arguments,
    positive,
)
from ridgeline.cli.arguments.inputs import describe
from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.command import FINE, Output
from ridgeline.decision.memory import compile_times
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose
from ridgeline.planner.exchanges.exchange_table import exchange_table
from ridgeline.planner.labels import label
from ridgeline.reporting.plan_grids import exchanges_grid, knobs_grid
from ridgeline.reporting.terminal.text import grid_text, ranking_text, warnings

EXCHANGES = "sync"
"""What `--explain` calls all ways to exchange gradients."""


class PlanCommand:
    """Rank the ways to run a training step on this machine, with reasons; nothing is trained."""

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        add_task_arguments(parser)
        add_machine_argument(parser)
        parser.add_argument(
            "--devices",
            type=positive,
            metavar="N",
            help="largest number of workers (default: what train would compare)",
        )
        parser.add_argument(
            "--steps", type=positive, metavar="N", help="steps of the run, if known"
        )
        add_allow_argument(parser)
        parser.add_argument(
            "--explain",
            metavar="KNOB",
            help="why one knob has its value; sync: every way to exchange gradients beside each other",
        )
        add_file_argument(parser, "also write the best plan here")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Describe, choose, show."""
        machine, workloads = describe(args, output, most=args.devices, allow=args.allow)
        output.progress("comparing plans")
        name = next(iter(workloads.values())).name
        ranking = choose(
            machine,
            workloads,
            world_size=args.devices,
            allow=args.allow,
            steps=args.steps,
            # What this host's compiler takes says nothing of another host, so its assumption stays.
            compile_factor=1.0 if args.machine is not None else _compile_factor(name),
        )
        if args.output is not None:
            output.progress(f"wrote {ranking.best.plan.save(args.output)}")
        if args.explain == EXCHANGES:
            plan = _of_several(ranking)
            rows = exchange_table(machine, workloads, plan, allow=args.allow, error=ranking.error)
            shown = grid_text(exchanges_grid(rows), label(plan))
            output.result({"plan": plan, "ways": rows}, shown)
        elif args.explain is not None:
            choice = ranking.choice(args.explain)
            grid = knobs_grid([choice], f"{choice.knob} = {choice.value}")
            output.result({"choice": choice}, grid_text(grid, f"set by {choice.origin}"))
        else:
            notes = workloads[ranking.best.plan.workers].notes
            output.result(ranking, ranking_text(ranking), *warnings(notes))
        return FINE


def _of_several(ranking: Ranking) -> Plan:
    """The best plan, or the best one of several workers where there is one."""
    # A worker alone exchanges nothing, so that its plan would have one row.
    plans = [candidate.plan for candidate in ranking.candidates]
    return next((plan for plan in plans if plan.workers > 1), plans[0])


def _compile_factor(task: str) -> float:
    """What compiling a task takes on this host over what is assumed of it."""
    from ridgeline.probe.measure import known_machine

    return compile_times.load(known_machine().directory).factor(task)
