"""`ridgeline simulate`: how a training step would go, here or on another machine."""

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from ridgeline import units
from ridgeline.cli.arguments.flags import (
    add_machine_argument,
    add_task_arguments,
    cluster,
    counts,
    stragglers,
)
from ridgeline.cli.arguments.inputs import describe, differing
from ridgeline.cli.arguments.output_file import add_file_argument
from ridgeline.cli.command import FINE, Output
from ridgeline.cli.curves.layer_intensity import show_intensity
from ridgeline.cli.curves.scaling_curve import STRONG, WEAK, Curve, curve
from ridgeline.cli.curves.simulated_page import draw_curve, draw_step
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.reporting.scaling_grids import (
    REGIMES,
    gain_text,
    levers_grid,
    points_grid,
)
from ridgeline.reporting.terminal.text import grid_text, plan_text, title, warnings
from ridgeline.reporting.terminal.text_intensity import intensity_text
from ridgeline.reporting.terminal.text_step import memory_text, timeline_text, waterfall_text
from ridgeline.simulator.curves.levers import Lever, elsewhere, levers
from ridgeline.simulator.curves.scaling import ScalingPoint, scaling_curve
from ridgeline.simulator.curves.what_if import parse_what_if, what_if
from ridgeline.simulator.layers.intensity import Intensities, intensities
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify
from ridgeline.verdict.predicted_scaling import superlinear


class SimulateCommand:
    """Predict a training step: its timeline, where its time goes, what would make it faster, how it scales.

    The plan is the best one for the given number of workers. With --what-if the same step is also
    predicted on a machine with faster parts, or on another one. Gains have intervals: what nine in ten
    machines give that are drawn from the measured spread.
    """

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this verb."""
        add_task_arguments(parser)
        add_machine_argument(parser)
        parser.add_argument(
            "--devices",
            type=counts,
            metavar="N,...",
            help="workers (default: the most that train would compare); of several, such as 1,2,4,...,64, "
            "the scaling curve alone is shown",
        )
        parser.add_argument(
            "--scaling",
            choices=(STRONG, WEAK),
            default=STRONG,
            help="with several numbers of workers: they share one batch (strong, the default), or each has "
            "a batch of the task's size (weak; of one number: beside one worker)",
        )
        parser.add_argument(
            "--cluster",
            type=cluster,
            metavar="SIZE:RATE:LATENCY,...",
            help="how more such hosts are connected, innermost level first: 8:400gbit:5us,16:1600gbit:8us "
            "are hosts of 8 devices that share 400 Gbit/s, 5 us apart, 16 of them in a rack that shares 1600 "
            "Gbit/s, 8 us from other racks; with :2jobs or :100gbit behind that, others use those links, too "
            "(default: what the profile says)",
        )
        parser.add_argument(
            "--stragglers",
            type=stragglers,
            metavar="SPREAD,FACTORx:COUNT",
            help="how devices that wait for each other differ in speed: 5%%,1.3x:1 vary by 5 %% from step "
            "to step, and one takes 1.3 times as long; measured takes the spread of the profile's numbers "
            "(default: what the profile says)",
        )
        parser.add_argument(
            "--what-if",
            action="append",
            metavar="PART=FACTORx,...",
            help="parts that are faster, by 1e-6 to 1e9 or free: compute, memory, dispatch (or launch), "
            "links, collectives (or communication), stragglers; e.g. compute=2x,launch=free. Or the profile "
            "of another machine, FILE.json",
        )
        parser.add_argument(
            "--intensity",
            action="store_true",
            help="what each layer sends where workers share its samples, or its columns, and FLOP per byte "
            "of that; with one number of workers, only this is shown",
        )
        words = "also draw what is predicted, on an HTML page of its own"
        add_file_argument(parser, words, "--report")

    def run(self, args: argparse.Namespace, output: Output) -> int:
        """Describe, predict, show."""
        # Parts that are given apart are asked about together: one step has all of them.
        question = ",".join(args.what_if or ())
        other = _profile(args.what_if or ())
        factors = parse_what_if(question) if args.what_if is not None and other is None else {}
        if args.scaling == WEAK and args.devices is not None and len(args.devices) == 1:
            # Beside the step of one alone; by themselves workers with batches of their own have no speed-up.
            args.devices = tuple(dict.fromkeys((1, *args.devices)))
        if args.devices is not None and len(args.devices) > 1:
            found = curve(args, output)
            then = other or (what_if(found.machine, factors, found.all_ops) if factors else None)
            return _show_curve(found, question, then, args, output)
        if args.intensity:
            return show_intensity(args, output)
        wished = None if args.devices is None else args.devices[0]
        machine, workloads = describe(args, output, wished=wished)
        workers = max(workloads)
        workload = workloads[workers]
        plan = choose(machine, workloads, fixed={"workers": workers}).best.plan
        machine = differing(machine, args.stragglers, workload, plan)
        timeline = simulate(machine, workload, plan)
        # Against itself, since nothing but its waterfall is wanted.
        split = verify(timeline, timeline, machine=machine, workload=workload)
        points = scaling_curve(machine, workloads, plan, list(workloads))
        value: dict[str, Any] = {
            "plan": plan.settings,
            "timeline": timeline,
            "waterfall": split.waterfall,
            "scaling": points,
        }
        shown = _shown(plan, timeline, split)
        shown += warnings(workload.notes)
        others: dict[str, tuple[ScalingPoint, ...]] = {}
        if args.what_if is not None:
            faster = other or what_if(machine, factors, workload)
            then = simulate(faster, workload, plan)
            lever = (
                levers(machine, workload, plan, [factors])[0]
                if other is None
                else elsewhere(machine, other, workload, plan)
            )
            _check_left(question, then.step_ns)
            value["what_if"] = {"factors": factors, "timeline": then, "lever": lever}
            headings = ("Predicted", f"Predicted with {question}")
            others[question] = scaling_curve(faster, workloads, plan, list(workloads))
            shown.append(_gain(question, timeline, lever))
            shown.append(timeline_text([timeline, then], headings=headings))
        else:
            shown.append(timeline_text([timeline]))
        value["levers"] = levers(machine, workload, plan)
        shown.append(grid_text(levers_grid(value["levers"], "Levers")))
        if args.report is not None:
            found = Curve(plan, machine, workloads, tuple(workloads))
            drawn = draw_step(args.report, found, timeline, points, others, value["levers"])
            output.progress(f"written to {drawn}")
        shown.append(_scaling(points, "predicted"))
        output.result(value, *shown, *warnings(superlinear(points)))
        return FINE


def _show_curve(
    found: Curve, question: str, then: Machine | None, args: argparse.Namespace, output: Output
) -> int:
    """Predict and show the curve, and that on another machine, where one is asked about."""
    points, regime = found.points(), args.scaling
    value: dict[str, Any] = {"plan": found.plan.settings, "regime": regime, "scaling": points}
    shown = [plan_text(found.plan), _scaling(points, f"predicted; {REGIMES[regime]}")]
    if then is not None:
        value["what_if"] = found.points(then)
        _check_left(question, min(point.step_s for point in value["what_if"]))
        shown.append(_scaling(value["what_if"], f"predicted; {question}"))
    shared: Intensities | None = None
    if args.intensity:
        most = points[-1].workers
        shared = value["intensity"] = intensities(found.load(most), most, found.machine)
        shown.append(intensity_text(shared))
    if args.report is not None:
        others = {question: value["what_if"]} if then is not None else {}
        drawn = draw_curve(args.report, found, points, others, regime, shared)
        output.progress(f"written to {drawn}")
    told = () if shared is None else shared.notes
    notes = [note for note in points[-1].notes if note not in told]  # of the most workers
    # What a step is of, such as data that has less than a batch.
    notes += found.load(points[-1].workers).notes
    shown += warnings([*superlinear(points), *notes])
    output.result(value, *shown)
    return FINE


def _check_left(question: str, step: float) -> None:
    """Refuse a what-if that leaves a step of 0: it has no speed that could be compared.

    Raises:
        MachineError: it takes no time.
    """
    if not step:
        raise MachineError(
            f"wanted a what-if that leaves something of the step, got {question}, with which it takes no "
            "time; leave out a part"
        )


def _scaling(points: Sequence[ScalingPoint], line: str) -> RenderableType:
    return grid_text(points_grid(points, "Scaling"), line)


def _profile(questions: Sequence[str]) -> Machine | None:
    """Another machine, where its profile is what is asked about; None where parts are."""
    profiles = [question for question in questions if question.endswith(".json")]
    if not profiles:
        return None
    if len(questions) > 1:
        raise MachineError(
            f"wanted parts, or the profile of one other machine, got {', '.join(questions)} in the what-if; "
            "ask about each by itself"
        )
    return Machine.load(profiles[0])


def _shown(plan: Plan, timeline: Timeline, split: Verdict) -> list[RenderableType]:
    notes = warnings(timeline.notes)
    return [plan_text(plan), waterfall_text(split), memory_text(timeline), *notes]


def _gain(text: str, timeline: Timeline, lever: Lever) -> RenderableType:
    before, after = units.nanoseconds(timeline.step_ns), units.seconds(lever.step_s)
    return title(f"What if {text}", f"{before} becomes {after}, {gain_text(lever)} as fast")
