"""Sections of the report about scaling: of runs that were measured, and of a predicted curve."""

from ridgeline import units
from ridgeline.reporting.charts.chart_predicted_scaling import predicted_scaling_figure
from ridgeline.reporting.charts.chart_scaling import scaling_figure
from ridgeline.reporting.labels import as_sentence
from ridgeline.reporting.page.html import Markup, tag
from ridgeline.reporting.page.sections import (
    bound_units,
    chart,
    facts,
    grid_box,
    grid_table,
    note_list,
    section,
)
from ridgeline.reporting.scaling_grids import (
    REGIMES,
    coefficient_lines,
    gain_text,
    how_much,
    laws_grid,
    lever_name,
    levers_grid,
    points_grid,
    runs_grid,
    surely_helping,
)
from ridgeline.verdict.predicted_scaling import WORTH_WHILE, PredictedScaling
from ridgeline.verdict.scaling_nouns import MeasuredScaling

IDENTITY = "predicted-scaling"


def scaling_section(scaling: MeasuredScaling | None) -> Markup | None:
    """The curve with the laws through it, both as tables, and the notes; None without runs."""
    if scaling is None:
        return None
    notes = (tag("p", f"{note}.") for note in scaling.notes)
    return section(
        "scaling",
        "Scaling",
        scaling_reading(scaling),
        chart("scaling", scaling_figure(scaling), "Samples per second by number of workers"),
        grid_table(runs_grid(scaling)),
        grid_table(laws_grid(scaling.laws, "Laws through the points")),
        *notes,
    )


def scaling_reading(scaling: MeasuredScaling) -> str:
    """One sentence on the largest run and what the first law makes of all."""
    # The first law is that of the regime; the others are told in the table.
    last, first = scaling.points[-1], scaling.laws[0]
    text = (
        f"{last.workers} workers do {last.speedup:.2f} times the work of one "
        f"({units.percent(last.efficiency)} each); {REGIMES[scaling.regime]}"
    )
    return f"{text}. {first.name.capitalize()}'s law: {', '.join(coefficient_lines(first))}."


def predicted_scaling_section(scaling: PredictedScaling | None) -> Markup | None:
    """The verdict, the curve, all figures, the levers and what was assumed; None without a curve."""
    if scaling is None:
        return None
    figure = predicted_scaling_figure(scaling)
    label = "Predicted samples per second and efficiency by number of workers"
    most = units.counted(scaling.points[-1].workers, "worker")
    grids = [points_grid(other.points, f"What if {other.question}") for other in scaling.others]
    if scaling.laws:
        grids.append(laws_grid(scaling.laws, "Laws through the predicted points"))
    if scaling.levers:
        grids.append(levers_grid(scaling.levers, f"Levers at {most}"))
    return section(
        IDENTITY,
        "Predicted scaling",
        predicted_scaling_reading(scaling),
        chart(IDENTITY, figure, label),
        grid_table(points_grid(scaling.points, "Predicted, by number of workers")),
        *map(grid_box, grids),
        tag("h3", "What was assumed"),
        _assumed(scaling),
        note_list(scaling.notes),
    )


def predicted_scaling_reading(scaling: PredictedScaling) -> str:
    """Efficiency at the largest number, where it falls off, and which lever helps most there."""
    first, last = scaling.points[0], scaling.points[-1]
    whole = units.counted(last.workers, "worker")
    if first == last:
        parts = [f"{whole}: {units.digits3(last.samples_per_s)} samples/s are predicted"]
    else:
        work = (
            f"{whole} are predicted to do {last.speedup:.2f} times the work of one "
            f"({units.percent(last.efficiency)} each)"
        )
        parts = [work, _fall(scaling, first.workers)]
    # Not always the largest number: beyond some, exchanging costs more than workers add.
    most = max(scaling.points, key=lambda point: point.samples_per_s)
    if most != last:
        parts.append(f"the most is done by {units.counted(most.workers, 'worker')}")
    for best in surely_helping(scaling.levers)[:1]:
        words = (
            f"{lever_name(best)} {how_much(scaling.levers)}: the step is {gain_text(best)} as fast"
        )
        parts.append(f"at {last.workers}, {words}")
    if scaling.levers and not surely_helping(scaling.levers):
        parts.append(
            f"at {last.workers}, no part of the machine alone helps by more than its spread"
        )
    return as_sentence("; ".join(parts))


def _fall(scaling: PredictedScaling, least: int) -> str:
    share = f"{100 * WORTH_WHILE:.0f} %"
    found = scaling.falls_off
    if found is None:
        return f"efficiency stays at {share} or more"
    before, after = found
    if before is None:
        return f"efficiency is below {share} from {units.counted(least, 'worker')} on"
    return f"efficiency falls below {share} between {before} and {units.counted(after, 'worker')}"


def _assumed(scaling: PredictedScaling) -> Markup:
    whose = "of all workers together" if scaling.regime == "strong" else "of each worker"
    levels = "; ".join(map(str, scaling.cluster))
    told = {
        "Machine": scaling.machine,
        "Cluster": levels
        or "none described: more workers are taken to use the links that were measured",
        "Scaling": REGIMES[scaling.regime],
        "Batch": f"{scaling.samples} samples a step, {whose}",
        "Plan": repr(scaling.plan),
        "Intervals": "nine in ten machines drawn from the measured spread, without the model's error",
    }
    return facts({name: bound_units(text) for name, text in told.items()})
