"""Section of the report about runs with several numbers of workers."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.reporting.charts.chart_scaling import scaling_figure
from ridgeline.reporting.page.html import Content, Markup, table, tag
from ridgeline.reporting.page.sections import chart, section
from ridgeline.reporting.terminal.text_scaling import REGIMES, coefficient_lines
from ridgeline.verdict.scaling_nouns import Law, MeasuredScaling


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
        _runs(scaling),
        laws_table(scaling.laws),
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


def _runs(scaling: MeasuredScaling) -> Markup:
    rows: list[tuple[Content, ...]] = [
        (
            str(point.workers),
            str(point.samples),
            units.seconds(point.step_s),
            units.digits3(point.samples_per_s),
            f"{point.speedup:.2f} x",
            units.percent(point.efficiency),
            "" if point.serial_fraction is None else units.percent(point.serial_fraction),
            "" if point.error is None else f"{100 * point.error:+.1f} %",
            point.run,
        )
        for point in scaling.points
    ]
    return table(
        (
            *("Workers", "Samples each", "Step", "Samples/s", "Speed-up", "Efficiency"),
            *("Serial part", "Error of the prediction", "Run"),
        ),
        rows,
        caption="Runs by their number of workers",
        numeric=range(8),
    )


def laws_table(laws: Sequence[Law]) -> Markup:
    """Each law with its coefficients, and by how much it misses the point that it misses most."""
    rows: list[tuple[Content, ...]] = [
        (
            law.name,
            "; ".join(coefficient_lines(law)),
            units.percent(max(map(abs, law.misses))),
            law.note,
        )
        for law in laws
    ]
    return table(
        ("Law", "Coefficients, with 90 % intervals where there are any", "Worst miss", "Note"),
        rows,
        caption="Laws through the points",
        numeric=(2,),
    )
