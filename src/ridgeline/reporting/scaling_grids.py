"""How a step scales, measured and predicted, as tables: runs, predictions, laws, and levers."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import as_sentence
from ridgeline.simulator.curves.levers import Lever
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.simulator.curves.what_if import FREE, MOST_FACTOR
from ridgeline.verdict.scaling_nouns import FittedNumber, Law, MeasuredScaling

REGIMES = {"strong": "strong: the workers share one batch", "weak": "weak: each has its own batch"}
LEAST_GAIN = 1.01
"""Gains of levers below that are not worth a look."""
_REVEALED = {"strong": "Karp-Flatt", "weak": "Gustafson"}
"""Whose formula gives the serial part that a speed-up reveals."""
_COEFFICIENTS = {
    "serial_fraction": "serial part",
    "limit": "limit",
    "sigma": "contention",
    "kappa": "coherence",
    "peak": "peak",
}
_SHARES = ("serial_fraction", "sigma")


def runs_grid(scaling: MeasuredScaling) -> Grid:
    """A row for each run, with its efficiency as a bar."""
    head = (
        *("Workers", "Samples each", "Step", "Quartiles", "Samples/s", "Speed-up", "Efficiency"),
        *(_REVEALED[scaling.regime], "Predicted", "Error", "Run"),
    )
    rows = tuple(
        (
            str(point.workers),
            str(point.samples),
            units.seconds(point.step_s),
            _between(point.low_s, point.high_s),
            units.digits3(point.samples_per_s),
            f"{point.speedup:.2f} x",
            units.percent(point.efficiency),
            "" if point.serial_fraction is None else units.percent(point.serial_fraction),
            "" if point.predicted_s is None else units.seconds(point.predicted_s),
            "" if point.error is None else f"{100 * point.error:+.1f} %",
            point.run,
        )
        for point in scaling.points
    )
    bars = tuple(point.efficiency for point in scaling.points)
    return Grid("Runs", head, rows, right=range(10), bars=bars)


def points_grid(points: Sequence[ScalingPoint], title: str) -> Grid:
    """A row for each number of workers that is predicted, with its efficiency as a bar."""
    # Where no machines were drawn nobody knows an interval, and an empty column says nothing.
    are_drawn = any(point.low_s is not None for point in points)
    interval = ("90 %",) if are_drawn else ()
    head = ("Workers", "Samples each", "Step", *interval, "Samples/s", "Speed-up", "Efficiency")
    rows = tuple(
        (
            str(point.workers),
            _count(point.samples_per_s * point.step_s / point.workers),
            units.seconds(point.step_s),
            *((_between(point.low_s, point.high_s),) if are_drawn else ()),
            units.digits3(point.samples_per_s),
            f"{point.speedup:.2f} x",
            units.percent(point.efficiency),
        )
        for point in points
    )
    bars = tuple(point.efficiency for point in points)
    return Grid(title, head, rows, right=range(len(head)), bars=bars)


def laws_grid(laws: Sequence[Law], title: str) -> Grid:
    """Each law with its coefficients, the point that it misses most, and what it says of other numbers."""
    # All laws are read at the same numbers of workers.
    counts = [point.workers for point in laws[0].points]
    head = ("Law", "Coefficients", "Worst miss", *(f"{count} workers" for count in counts), "Note")
    rows = tuple(
        (
            law.name,
            "\n".join(coefficient_lines(law)),
            units.percent(max(map(abs, law.misses))),
            *(_rate(point.samples_per_s) for point in law.points),
            law.note,
        )
        for law in laws
    )
    return Grid(title, head, rows, right=range(2, len(head) - 1))


def levers_grid(levers: Sequence[Lever], title: str) -> Grid:
    """Each part twice as fast, the largest gain first, with its gain as a bar, and which of them help."""
    ordered = sorted(levers, key=lambda lever: -lever.gain)
    rows = tuple(
        (
            lever_name(lever),
            units.seconds(lever.step_s),
            f"{lever.gain:.2f} x",
            f"{lever.low:.2f} .. {lever.high:.2f}",
        )
        for lever in ordered
    )
    # Twice as fast is the most that a part twice as fast can make of a step.
    bars = tuple(lever.gain - 1.0 for lever in ordered)
    head = ("Faster", "Step", "As fast", "90 %")
    return Grid(title, head, rows, as_sentence(_helping(ordered)), bars=bars)


def surely_helping(levers: Sequence[Lever]) -> list[Lever]:
    """Those with a gain beyond its spread, the largest first: told by the low end of its interval."""
    return sorted((each for each in levers if each.low > LEAST_GAIN), key=lambda each: -each.gain)


def _helping(ordered: Sequence[Lever]) -> str:
    helping = [" and ".join(lever.factors) for lever in surely_helping(ordered)]
    if not helping:
        return "no part alone helps by more than its spread"
    if len(helping) > 1:
        return f"{', then '.join(helping)} help"
    return f"{helping[0]} {how_much(ordered)}"


def how_much(levers: Sequence[Lever]) -> str:
    """What is said of the one that surely helps: another may have the larger gain, and a wider spread."""
    first = max(levers, key=lambda lever: lever.gain)
    return "helps most" if first.low > LEAST_GAIN else "helps by more than its spread"


def lever_name(lever: Lever) -> str:
    """The parts that are faster, and by how much."""
    return ", ".join(
        f"{part} {FREE}" if factor == MOST_FACTOR else f"{part} {factor:g} x"
        for part, factor in lever.factors.items()
    )


def gain_text(lever: Lever) -> str:
    """The gain with its interval."""
    return f"{lever.gain:.2f} x ({lever.low:.2f} to {lever.high:.2f})"


def coefficient_lines(law: Law) -> list[str]:
    """The coefficients of a law, each with its interval; what its note calls meaningless is left out."""
    return [
        f"{_COEFFICIENTS[name]} {_estimate(name, estimate)}"
        for name, estimate in law.coefficients.items()
        if not (name in ("kappa", "peak") and law.note)
    ]


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
    # So small that percents would be all zeros.
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


def _count(value: float) -> str:
    """A whole number in all its digits; a quotient may be beside it by rounding."""
    whole = round(value)
    return str(whole) if abs(value - whole) <= 1e-6 * value else units.digits3(value)


def _between(low_s: float | None, high_s: float | None) -> str:
    if low_s is None or high_s is None:
        return ""
    return f"{units.seconds(low_s)} .. {units.seconds(high_s)}"
