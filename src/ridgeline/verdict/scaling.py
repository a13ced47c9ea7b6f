"""`scaling`: what runs with several numbers of workers show together, and the laws through them."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Literal, NamedTuple

from ridgeline import laws, units
from ridgeline.codec import Noun, Value
from ridgeline.errors import LawError
from ridgeline.laws.resampling import LEAST_TO_EXTRAPOLATE, Fit
from ridgeline.plan import Plan
from ridgeline.timeline import Timeline
from ridgeline.workload import Workload

OFF_CURVE = 0.1
"""A point that the nearest law misses by more lies off a smooth curve."""
QUARTILES_IN_DEVIATIONS = 1.349
"""How many standard deviations the quartiles of a normal distribution are apart."""
LEAST_FOR_USL = 3

Kind = Literal["strong", "weak"]
LawName = Literal["amdahl", "gustafson", "usl"]
FITS: dict[LawName, Callable[[Sequence[float], Sequence[float]], Fit]] = {
    "amdahl": laws.fit_amdahl,
    "gustafson": laws.fit_gustafson,
    "usl": laws.fit_usl,
}


class MeasuredRun(NamedTuple):
    """One run: its name, the step of one worker, as measured and predicted, how and where it was run."""

    name: str
    workload: Workload
    measured: Timeline
    predicted: Timeline | None = None
    plan: Plan | None = None
    fingerprint: str = ""
    """Of the machine; empty where nothing tells."""


class Estimate(Value, frozen=True, kw_only=True):
    """A fitted number and the interval that covers 90 % of resampled ones; None where nothing tells.

    A limit or a peak may be infinite, for which JSON has no number: then `value` or `high` is None.
    """

    value: float | None
    low: float | None = None
    high: float | None = None


class MeasuredPoint(Value, frozen=True, kw_only=True):
    """A run in a scaling curve.

    `speedup` compares samples per second with those of the smallest number of workers, per worker of it;
    `serial_fraction` is what that speed-up reveals, by Karp and Flatt where all workers share one batch, by
    Gustafson where each has its own. `low_s` and `high_s` are the quartiles of the measured steps.
    """

    run: str
    workers: int
    samples: int
    """Of each worker and step."""
    num_steps: int
    step_s: float
    low_s: float
    high_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    serial_fraction: float | None = None
    predicted_s: float | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured step, minus 1."""
        return None if self.predicted_s is None else self.predicted_s / self.step_s - 1.0


class LawPoint(Value, frozen=True, kw_only=True):
    """Samples per second of a number of workers, by a law."""

    workers: int
    samples_per_s: Estimate


class Law(Value, frozen=True, kw_only=True):
    """A law through the points, and what it says of other numbers of workers.

    `rate` are samples per second of one worker, `misses` law over measured point, minus 1, in their order.
    """

    name: LawName
    coefficients: dict[str, Estimate]
    rate: Estimate
    misses: tuple[float, ...]
    points: tuple[LawPoint, ...] = ()
    note: str = ""

    def throughput(self, workers: float) -> float:
        """Samples per second of so many workers."""
        rate = self.rate.value or 0.0
        found = {name: one.value or 0.0 for name, one in self.coefficients.items()}
        if self.name == "gustafson":
            return rate * laws.gustafson(found["serial_fraction"], workers)
        sigma = found["serial_fraction" if self.name == "amdahl" else "sigma"]
        return laws.usl(workers, sigma=sigma, kappa=found.get("kappa", 0.0), rate=rate)


class Scaling(Noun, frozen=True, kw_only=True):
    """How a training step scales with workers: runs, laws through them, and what is odd about them."""

    kind: ClassVar[str] = "scaling"

    title: str
    regime: Kind
    """`strong`: the workers share one batch, however many they are; `weak`: each has as much as before."""
    points: tuple[MeasuredPoint, ...]
    laws: tuple[Law, ...]
    notes: tuple[str, ...] = ()


def scaling(runs: Sequence[MeasuredRun], devices: Sequence[int] = ()) -> Scaling:
    """What several runs of one step show together.

    Args:
        runs: Of at least two different numbers of workers, which share one batch or have as much each.
        devices: Numbers of workers for which the laws say something, too.

    Raises:
        LawError: runs of different steps or of one number of workers, or batches that fit neither.
    """
    titles = sorted({run.measured.title for run in runs})
    if len(titles) != 1:
        raise LawError(
            f"wanted runs of one training step, got {' and '.join(titles) or 'none'}; name runs of one task"
        )
    ordered = sorted(runs, key=lambda run: (run.measured.workers, run.name))
    kind = _kind(ordered)
    points = _points(ordered, kind)
    found = _laws(points, kind, devices)
    return Scaling(
        title=titles[0],
        regime=kind,
        points=points,
        laws=found,
        notes=(*_differences(ordered), *_notes(points, found, devices)),
    )


def _kind(runs: Sequence[MeasuredRun]) -> Kind:
    counts = sorted({run.measured.workers for run in runs})
    if len(counts) < 2:
        raise LawError(
            f"wanted runs with at least 2 different numbers of workers, got {len(runs)} with {counts}; train "
            "with another --workers too"
        )
    if len({run.workload.samples for run in runs}) == 1:
        return "weak"
    wholes = [run.workload.samples * run.measured.workers for run in runs]
    # What does not divide is shared out with one sample more for some: the first worker's tells.
    if all(abs(whole - wholes[0]) < max(counts) for whole in wholes):
        return "strong"
    shares = ", ".join(f"{run.measured.workers} x {run.workload.samples}" for run in runs)
    raise LawError(
        f"wanted one batch that the workers share, or as many samples for each, got workers x samples of "
        f"{shares}; train with one --batch-size, or with one that grows with the workers"
    )


def _points(runs: Sequence[MeasuredRun], kind: Kind) -> tuple[MeasuredPoint, ...]:
    steps = [run.measured.step_ns * 1e-9 for run in runs]
    pairs = list(zip(runs, steps, strict=True))
    rates = [run.measured.workers * run.workload.samples / step_s for run, step_s in pairs]
    least = runs[0].measured.workers
    firsts = [
        rate for (run, _), rate in zip(pairs, rates, strict=True) if run.measured.workers == least
    ]
    base = statistics.median(firsts) / least
    return tuple(
        _point(run, step_s, rate, rate / base, kind)
        for (run, step_s), rate in zip(pairs, rates, strict=True)
    )


def _point(
    run: MeasuredRun, step_s: float, rate: float, speedup: float, kind: Kind
) -> MeasuredPoint:
    workers = run.measured.workers
    ends = [step_s, step_s]
    if len(run.measured.steps_ns) > 1:
        quartiles = statistics.quantiles(run.measured.steps_ns, n=4, method="inclusive")
        ends = [quartiles[0] * 1e-9, quartiles[2] * 1e-9]
    serial = None
    if workers > 1:
        serial = laws.karp_flatt(speedup, workers)
        if kind == "weak":
            serial = (workers - speedup) / (workers - 1.0)
    return MeasuredPoint(
        run=run.name,
        workers=workers,
        samples=run.workload.samples,
        num_steps=len(run.measured.steps_ns),
        step_s=step_s,
        low_s=ends[0],
        high_s=ends[1],
        samples_per_s=rate,
        speedup=speedup,
        efficiency=speedup / workers,
        serial_fraction=serial,
        predicted_s=None if run.predicted is None else run.predicted.step_ns * 1e-9,
    )


def _laws(points: Sequence[MeasuredPoint], kind: Kind, devices: Sequence[int]) -> tuple[Law, ...]:
    names: list[LawName] = ["amdahl" if kind == "strong" else "gustafson"]
    if len({point.workers for point in points}) >= LEAST_FOR_USL:
        names.append("usl")
    return tuple(_law(name, points, devices) for name in names)


def _law(name: LawName, points: Sequence[MeasuredPoint], devices: Sequence[int]) -> Law:
    fit = FITS[name]
    counts = [float(point.workers) for point in points]
    rates = [point.samples_per_s for point in points]
    spreads: list[float] = []
    if all(point.num_steps > 1 for point in points):
        quartiles = [(point.high_s - point.low_s) / point.step_s for point in points]
        spreads = [width / QUARTILES_IN_DEVIATIONS for width in quartiles]
    found = fit(counts, rates)
    others = laws.resampled(fit, counts, rates, spreads)
    drawn = [other.coefficients for other in others]
    return Law(
        name=name,
        coefficients={
            key: _estimate(value, [one[key] for one in drawn])
            for key, value in found.coefficients.items()
        },
        rate=_estimate(found.throughput(1), [other.throughput(1) for other in others]),
        misses=tuple(
            found.throughput(count) / rate - 1.0 for count, rate in zip(counts, rates, strict=True)
        ),
        points=tuple(
            LawPoint(
                workers=count,
                samples_per_s=_estimate(
                    found.throughput(count), [other.throughput(count) for other in others]
                ),
            )
            for count in devices
        ),
        note=getattr(found, "note", ""),
    )


def _estimate(value: float, drawn: Sequence[float]) -> Estimate:
    low, high = laws.interval(drawn) if drawn else (math.nan, math.nan)
    return Estimate(value=_finite(value), low=_finite(low), high=_finite(high))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _differences(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """What differs between runs besides their number of workers."""
    plans = [run.plan for run in runs if run.plan is not None]
    ways = sorted({f"{plan.execution} in {plan.precision}" for plan in plans})
    if len(ways) > 1:
        yield f"the runs differ in more than their workers: they were executed as {', '.join(ways)}"
    places = sorted({run.fingerprint for run in runs if run.fingerprint})
    if len(places) > 1:
        yield f"the runs are of {len(places)} machines or versions: {'; '.join(places)}"


def _notes(
    points: Sequence[MeasuredPoint], found: Sequence[Law], devices: Sequence[int]
) -> Iterator[str]:
    counts = sorted({point.workers for point in points})
    if counts[0] > 1:
        yield (
            f"no run has 1 worker: speed-ups are those over {counts[0]} workers, each taken as one of "
            f"{counts[0]} that lose nothing"
        )
    nearest = min(found, key=lambda law: max(map(abs, law.misses)))
    for point, miss in zip(points, nearest.misses, strict=True):
        if abs(miss) > OFF_CURVE:
            yield (
                f"{point.run}: {nearest.name} misses {point.workers} workers by {units.percent(abs(miss))}; "
                "where a curve breaks, workers meet another link, or another plan was run"
            )
    beyond = [count for count in devices if count > counts[-1]]
    if beyond and len(counts) < LEAST_TO_EXTRAPOLATE:
        yield (
            f"laws say little of {', '.join(map(str, beyond))} workers: they are fitted to {len(counts)} "
            f"numbers of workers up to {counts[-1]}, wanted {LEAST_TO_EXTRAPOLATE}; `ridgeline simulate` "
            "predicts from what the links do"
        )
