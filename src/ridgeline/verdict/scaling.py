"""`scaling`: what runs with several numbers of workers show together, and the laws through them."""

import math
import statistics
from collections.abc import Callable, Sequence

from ridgeline import laws, units
from ridgeline.errors import LawError
from ridgeline.laws.resampling import QUARTILES_IN_DEVIATIONS, Fit
from ridgeline.machine import Quantity
from ridgeline.verdict.scaling_notes import differences, notes_on
from ridgeline.verdict.scaling_nouns import (
    FittedNumber,
    Law,
    LawName,
    LawPoint,
    MeasuredPoint,
    MeasuredRun,
    MeasuredScaling,
    Regime,
)

LEAST_FOR_USL = 3

FITS: dict[LawName, Callable[[Sequence[float], Sequence[float]], Fit]] = {
    "amdahl": laws.fit_amdahl,
    "gustafson": laws.fit_gustafson,
    "usl": laws.fit_usl,
}


def scaling(runs: Sequence[MeasuredRun], devices: Sequence[int] = ()) -> MeasuredScaling:
    """What several runs of one step show together.

    Args:
        runs: Of at least two different numbers of workers, which share one batch or have as much each.
        devices: Numbers of workers for which the laws say something, too.

    Raises:
        LawError: runs of different steps or models, of one number of workers, or batches that fit neither.
    """
    titles = sorted({run.measured.title for run in runs})
    if len(titles) != 1:
        raise LawError(
            f"wanted runs of one training step, got {' and '.join(titles) or 'none'}; name runs of one task"
        )
    # The first one is the base of all speed-ups.
    ordered = sorted(runs, key=lambda run: (run.measured.workers, run.name))
    _check_models(ordered)
    regime = _regime(ordered)
    points = _points(ordered, regime)
    found = _laws(points, regime, devices)
    return MeasuredScaling(
        title=titles[0],
        regime=regime,
        points=points,
        laws=found,
        notes=(*differences(ordered), *notes_on(points, found, devices)),
    )


def _check_models(runs: Sequence[MeasuredRun]) -> None:
    """Refuse runs of one title whose models differ, as of a task file that was edited between them."""
    models = [
        tuple((one.name, one.shape, one.dtype) for one in run.workload.parameters) for run in runs
    ]
    for run, model in zip(runs, models, strict=True):
        if model != models[0]:
            sizes = [sum(p.num_bytes for p in one.workload.parameters) for one in (runs[0], run)]
            first, other = map(units.num_bytes, sizes)
            raise LawError(
                f"wanted runs of one model, got other parameters in {run.name} ({other}) than in "
                f"{runs[0].name} ({first}); name runs of one task"
            )


def _regime(runs: Sequence[MeasuredRun]) -> Regime:
    counts = sorted({run.measured.workers for run in runs})
    if len(counts) < 2:
        raise LawError(
            f"wanted runs with at least 2 different numbers of workers, got {len(runs)} with {counts}; train "
            "with another --workers too"
        )
    # Asked first: with one sample a worker, whole batches are also within what division leaves over.
    if len({run.workload.samples for run in runs}) == 1:
        return "weak"
    wholes = [run.workload.samples * run.measured.workers for run in runs]
    # What does not divide is shared out with one sample more for some: the first worker's counts.
    if all(abs(whole - wholes[0]) < max(counts) for whole in wholes):
        return "strong"
    shares = ", ".join(f"{run.measured.workers} x {run.workload.samples}" for run in runs)
    raise LawError(
        f"wanted one batch that the workers share, or as many samples for each, got workers x samples of "
        f"{shares}; train with one --batch-size, or with one that grows with the workers"
    )


def _points(runs: Sequence[MeasuredRun], regime: Regime) -> tuple[MeasuredPoint, ...]:
    rates = [
        run.measured.workers * run.workload.samples / (run.measured.step_ns * 1e-9) for run in runs
    ]
    pairs = list(zip(runs, rates, strict=True))
    least = runs[0].measured.workers
    # The median of all runs of that size, since a single one that was disturbed would move all points.
    base = statistics.median(rate for run, rate in pairs if run.measured.workers == least) / least
    return tuple(_point(run, rate, rate / base, regime) for run, rate in pairs)


def _point(run: MeasuredRun, rate: float, speedup: float, regime: Regime) -> MeasuredPoint:
    workers = run.measured.workers
    steps = Quantity.measured([1e-9 * step_ns for step_ns in run.measured.steps_ns], "s")
    serial = None
    if workers > 1:
        serial = laws.karp_flatt(speedup, workers)
        if regime == "weak":
            serial = (workers - speedup) / (workers - 1.0)  # Gustafson's law, solved for s
    return MeasuredPoint(
        run=run.name,
        workers=workers,
        samples=run.workload.samples,
        num_steps=steps.n,
        step_s=run.measured.step_ns * 1e-9,
        low_s=steps.low,
        high_s=steps.high,
        samples_per_s=rate,
        speedup=speedup,
        efficiency=speedup / workers,
        serial_fraction=serial,
        predicted_s=None if run.predicted is None else run.predicted.step_ns * 1e-9,
    )


def _laws(
    points: Sequence[MeasuredPoint], regime: Regime, devices: Sequence[int]
) -> tuple[Law, ...]:
    counts = [float(point.workers) for point in points]
    rates = [point.samples_per_s for point in points]
    spreads: list[float] = []
    # A single step has no quartiles, and a spread of 0 would call it exact.
    if all(point.num_steps > 1 for point in points):
        quartiles = [(point.high_s - point.low_s) / point.step_s for point in points]
        # Throughput is inverse to time: for small spreads both have the same relative one.
        spreads = [width / QUARTILES_IN_DEVIATIONS for width in quartiles]
    return tuple(
        fitted_law(
            name,
            counts,
            rates,
            resampled=laws.resampled(FITS[name], counts, rates, spreads),
            devices=devices,
        )
        for name in names_of_laws(regime, counts)
    )


def names_of_laws(regime: Regime, counts: Sequence[float]) -> tuple[LawName, ...]:
    """The laws that so many numbers of workers can be held to."""
    first: LawName = "amdahl" if regime == "strong" else "gustafson"
    return (first, "usl") if len(set(counts)) >= LEAST_FOR_USL else (first,)


def fitted_law(
    name: LawName,
    counts: Sequence[float],
    rates: Sequence[float],
    *,
    resampled: Sequence[Fit] = (),
    devices: Sequence[int] = (),
) -> Law:
    """A law through points, with intervals where fits to resampled points give any.

    Args:
        name: Of the law.
        counts: Numbers of workers.
        rates: Samples per second of each.
        resampled: See `laws.resampled`; none: nothing scatters.
        devices: Numbers of workers of which the law says something, too.

    Raises:
        LawError: too few points, or numbers out of range.
    """
    found = FITS[name](counts, rates)
    drawn = [other.coefficients for other in resampled]
    return Law(
        name=name,
        coefficients={
            key: _estimate(value, [one[key] for one in drawn])
            for key, value in found.coefficients.items()
        },
        rate=_estimate(found.throughput(1), [other.throughput(1) for other in resampled]),
        misses=tuple(
            found.throughput(count) / rate - 1.0 for count, rate in zip(counts, rates, strict=True)
        ),
        points=tuple(
            LawPoint(
                workers=count,
                samples_per_s=_estimate(
                    found.throughput(count), [other.throughput(count) for other in resampled]
                ),
            )
            for count in devices
        ),
        note=found.note,
    )


def _estimate(value: float, drawn: Sequence[float]) -> FittedNumber:
    low, high = laws.interval(drawn) if drawn else (math.nan, math.nan)
    return FittedNumber(value=_finite(value), low=_finite(low), high=_finite(high))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
