"""How measured runs scale, as text for the terminal: the runs, and the laws through them."""

from rich.console import Group, RenderableType
from rich.text import Text

from ridgeline import units
from ridgeline.reporting.terminal.text import bar, table, title, warnings
from ridgeline.verdict.scaling_nouns import FittedNumber, Law, MeasuredScaling

REGIMES = {"strong": "strong: the workers share one batch", "weak": "weak: each has its own batch"}
_REVEALED = {"strong": "Karp-Flatt", "weak": "Gustafson"}
_COEFFICIENTS = {
    "serial_fraction": "serial part",
    "limit": "limit",
    "sigma": "contention",
    "kappa": "coherence",
    "peak": "peak",
}
_SHARES = ("serial_fraction", "sigma")


def scaling_of_runs_text(scaling: MeasuredScaling) -> RenderableType:
    """The table of runs, that of laws, and the notes."""
    heading = title(f"Scaling of {scaling.title}", f"measured; {REGIMES[scaling.regime]}")
    return Group(
        heading,
        _runs(scaling),
        title("Laws", "through these runs, 90 % intervals"),
        _laws(scaling),
        *warnings(scaling.notes),
    )


def _runs(scaling: MeasuredScaling) -> RenderableType:
    head = (
        *("Workers", "Samples each", "Step", "Quartiles", "Samples/s", "Speed-up", "Efficiency"),
        *("", _REVEALED[scaling.regime], "Predicted", "Error", "Run"),
    )
    rows = table(head, right=(*range(7), 8, 9, 10))
    for point in scaling.points:
        serial, error = point.serial_fraction, point.error
        rows.add_row(
            str(point.workers),
            str(point.samples),
            units.seconds(point.step_s),
            f"{units.seconds(point.low_s)} .. {units.seconds(point.high_s)}",
            units.digits3(point.samples_per_s),
            f"{point.speedup:.2f} x",
            units.percent(point.efficiency),
            Text(bar(min(1.0, point.efficiency), 16), style="cyan"),
            "" if serial is None else units.percent(serial),
            "" if point.predicted_s is None else units.seconds(point.predicted_s),
            "" if error is None else f"{100 * error:+.1f} %",
            point.run,
        )
    return rows


def _laws(scaling: MeasuredScaling) -> RenderableType:
    # All laws are read at the same numbers.
    counts = [point.workers for point in scaling.laws[0].points]
    head = ("Law", "Coefficients", "Worst miss", *(f"{count} workers" for count in counts))
    rows = table(head, right=range(2, 3 + len(counts)))
    for law in scaling.laws:
        rows.add_row(
            law.name,
            "\n".join([*coefficient_lines(law), *([law.note] if law.note else [])]),
            units.percent(max(map(abs, law.misses))),
            *(_rate(point.samples_per_s) for point in law.points),
        )
    return rows


def coefficient_lines(law: Law) -> list[str]:
    """The coefficients of a law, each with its interval; what its note calls meaningless is left out."""
    lines = []
    for name, estimate in law.coefficients.items():
        if name in ("kappa", "peak") and law.note:
            continue
        lines.append(f"{_COEFFICIENTS[name]} {_estimate(name, estimate)}")
    return lines


def _estimate(name: str, estimate: FittedNumber) -> str:
    value = _number(name, estimate.value)
    if estimate.low is None:
        return value
    return f"{value} ({_number(name, estimate.low)} .. {_number(name, estimate.high)})"


def _number(name: str, value: float | None) -> str:
    if value is None:
        return "none"
    if name in _SHARES:
        return units.percent(value)
    if name == "kappa":
        return f"{value:.1e}"
    return f"{units.digits3(value)} {'x' if name == 'limit' else 'workers'}"


def _rate(estimate: FittedNumber) -> str:
    if estimate.value is None:
        return ""
    text = f"{units.digits3(estimate.value)}/s"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text}\n{units.digits3(estimate.low)} .. {units.digits3(estimate.high)}"
