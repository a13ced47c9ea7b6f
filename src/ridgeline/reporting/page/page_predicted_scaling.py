"""Section of the report about a predicted scaling curve."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.reporting.charts.chart_predicted_scaling import predicted_scaling_figure
from ridgeline.reporting.page.html import Content, Markup, join, table, tag
from ridgeline.reporting.page.page_scaling import laws_table
from ridgeline.reporting.page.sections import (
    as_sentence,
    bound_units,
    chart,
    facts,
    note_list,
    section,
)
from ridgeline.reporting.terminal.text_levers import LEAST_GAIN, gain_text, lever_name
from ridgeline.reporting.terminal.text_scaling import REGIMES
from ridgeline.simulator.curves.levers import Lever
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.verdict.predicted_scaling import WORTH_WHILE, OtherCurve, PredictedScaling

IDENTITY = "predicted-scaling"


def predicted_scaling_section(scaling: PredictedScaling | None) -> Markup | None:
    """The verdict, the curve, all figures, the levers and what was assumed; None without a curve."""
    if scaling is None:
        return None
    figure = predicted_scaling_figure(scaling)
    label = "Predicted samples per second and efficiency by number of workers"
    return section(
        IDENTITY,
        "Predicted scaling",
        predicted_scaling_reading(scaling),
        chart(IDENTITY, figure, label),
        _points(scaling.points, "Predicted, by number of workers"),
        *(_other(other) for other in scaling.others),
        *(
            (tag("h3", "Laws through the predicted points"), laws_table(scaling.laws))
            if scaling.laws
            else ()
        ),
        *(_levers(scaling) if scaling.levers else ()),
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
    # Told by the low end of its interval: a gain within the spread is none.
    best = max(scaling.levers, key=lambda lever: lever.gain, default=None)
    if best is not None:
        parts.append(
            f"at {last.workers}, {lever_name(best)} helps most: the step is {gain_text(best)} as fast"
            if best.low > LEAST_GAIN
            else f"at {last.workers}, no part of the machine alone helps by more than its spread"
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


def _points(points: Sequence[ScalingPoint], caption: str) -> Markup:
    rows: list[tuple[Content, ...]] = [
        (
            str(point.workers),
            units.digits3(point.samples_per_s * point.step_s / point.workers),
            units.seconds(point.step_s),
            _between(point),
            units.digits3(point.samples_per_s),
            f"{point.speedup:.2f} x",
            units.percent(point.efficiency),
        )
        for point in points
    ]
    head = (*("Workers", "Samples each", "Step", "90 %", "Samples/s", "Speed-up", "Efficiency"),)
    return table(head, rows, caption=caption, numeric=range(len(head)))


def _between(point: ScalingPoint) -> str:
    if point.low_s is None or point.high_s is None:
        return ""
    return f"{units.seconds(point.low_s)} to {units.seconds(point.high_s)}"


def _other(other: OtherCurve) -> Markup:
    title = f"What if {other.question}"
    return join((tag("h3", title), _points(other.points, title)))


def _levers(scaling: PredictedScaling) -> tuple[Markup, ...]:
    last = scaling.points[-1]
    rows: list[tuple[Content, ...]] = [
        (lever_name(lever), units.seconds(lever.step_s), *_gain(lever))
        for lever in sorted(scaling.levers, key=lambda lever: -lever.gain)
    ]
    title = f"Levers at {units.counted(last.workers, 'worker')}"
    head = ("Faster", "Step", "As fast", "90 %")
    return tag("h3", title), table(head, rows, caption=title, numeric=(1, 2, 3))


def _gain(lever: Lever) -> tuple[str, str]:
    return f"{lever.gain:.2f} x", f"{lever.low:.2f} to {lever.high:.2f}"


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
