"""`ridgeline simulate`: how a training step would go, here or on another machine."""

import argparse
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.cli.command import FINE, Output
from ridgeline.cli.inputs import (
    add_machine_argument,
    add_task_arguments,
    describe,
    positive,
)
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.reporting.text import plan_text, scaling_text, title
from ridgeline.reporting.text_step import timeline_text, waterfall_text
from ridgeline.simulator.step import scaling_curve, simulate
from ridgeline.simulator.what_if import parse_what_if, what_if
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify
from ridgeline.workload import Workload


class Command:
    """Predict a training step: its timeline, where its time goes, and how it scales.

    The plan is the best one for the given number of workers. With --what-if the same step is also
    predicted on a machine with faster parts.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        add_task_arguments(parser)
        add_machine_argument(parser)
        parser.add_argument(
            "--devices",
            type=positive,
            metavar="N",
            help="workers (default: the most that train would compare)",
        )
        parser.add_argument(
            "--what-if",
            action="append",
            metavar="PART=FACTORx,...",
            help="parts that are faster, by 1e-6 to 1e9: compute, memory, dispatch, links, collectives; "
            "e.g. links=2x",
        )

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Describe, predict, show."""
        question = ",".join(args.what_if or ())
        factors = parse_what_if(question) if args.what_if is not None else {}
        machine, workloads = describe(args, output, wished=args.devices)
        workers = max(workloads)
        workload = workloads[workers]
        plan = choose(machine, workloads, fixed={"workers": workers}).best.plan
        timeline = simulate(machine, workload, plan)
        split = verify(timeline, timeline, machine=machine, workload=workload)
        points = scaling_curve(machine, workloads, plan, list(workloads))
        value: dict[str, Any] = {
            "plan": plan.settings,
            "timeline": timeline,
            "waterfall": split.waterfall,
            "scaling": points,
        }
        shown = _shown(plan, timeline, split)
        shown += [Text(f"! {note}", style="yellow") for note in workload.notes]
        if factors:
            faster = _faster(machine, factors, workload, plan)
            value["what_if"] = {"factors": factors, "timeline": faster}
            headings = ("Predicted", f"Predicted with {question}")
            shown.append(_gain(question, timeline, faster))
            shown.append(timeline_text([timeline, faster], headings=headings))
        else:
            shown.append(timeline_text([timeline]))
        output.result(value, *shown, scaling_text(points))
        return FINE


def _shown(plan: Plan, timeline: Timeline, split: Verdict) -> list[RenderableType]:
    shown: list[RenderableType] = [plan_text(plan), waterfall_text(split)]
    shown += [Text(f"! {note}", style="yellow") for note in timeline.notes]
    return shown


def _faster(
    machine: Machine, factors: dict[str, float], workload: Workload, plan: Plan
) -> Timeline:
    """The same step on the machine with faster parts."""
    return simulate(what_if(machine, factors, workload), workload, plan)


def _gain(text: str, timeline: Timeline, faster: Timeline) -> RenderableType:
    ratio = timeline.step_ns / faster.step_ns if faster.step_ns else 1.0
    before, after = (units.nanoseconds(t.step_ns) for t in (timeline, faster))
    return title(f"What if {text}", f"{before} becomes {after}, {ratio:.2f} x as fast")
