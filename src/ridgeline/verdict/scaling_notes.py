"""What is odd about runs that are compared, and about the laws through them."""

import statistics
from collections.abc import Iterator, Sequence

from ridgeline import units
from ridgeline.laws.resampling import LEAST_TO_EXTRAPOLATE
from ridgeline.verdict.scaling_nouns import Law, MeasuredPoint, MeasuredRun

OFF_CURVE = 0.1
"""A point that the nearest law misses by more lies off a smooth curve."""


def differences(runs: Sequence[MeasuredRun]) -> Iterator[str]:
    """What differs between runs besides their number of workers."""
    plans = [run.plan for run in runs if run.plan is not None]
    ways = sorted({f"{plan.execution} in {plan.precision}" for plan in plans})
    if len(ways) > 1:
        yield f"the runs differ in more than their workers: they were executed as {', '.join(ways)}"
    # A worker alone exchanges nothing, whatever its plan says.
    several = [plan.sync for plan in plans if plan.workers > 1]
    for ways in ({sync.algorithm for sync in several}, {sync.compression for sync in several}):
        if len(ways) > 1:
            yield f"the runs differ in how gradients are exchanged: {', '.join(sorted(ways))}"
    # Without a number of threads torch decides, and it is unknown how many cores a run had.
    cores = {plan.workers * plan.threads for plan in plans if plan.threads}
    if len(plans) == len(runs) and all(plan.threads for plan in plans) and len(cores) == 1:
        yield (
            f"all runs share {cores.pop()} cores, more workers with fewer threads each: this is how that "
            "sharing scales, not more hardware"
        )
    places = sorted({run.fingerprint for run in runs if run.fingerprint})
    if len(places) > 1:
        yield f"the runs are of {len(places)} machines or versions: {'; '.join(places)}"


def notes_on(
    points: Sequence[MeasuredPoint], found: Sequence[Law], devices: Sequence[int]
) -> Iterator[str]:
    """Where speed-ups start, points off the curve, and laws that are asked about too many workers."""
    counts = sorted({point.workers for point in points})
    if counts[0] > 1:
        yield (
            f"no run has 1 worker: speed-ups are those over {counts[0]} workers, each taken as one of "
            f"{counts[0]} that lose nothing"
        )
    yield from _odd(points, found)
    beyond = [count for count in devices if count > counts[-1]]
    if beyond and len(counts) < LEAST_TO_EXTRAPOLATE:
        yield (
            f"laws say little about {', '.join(map(str, beyond))} workers: they are fitted to {len(counts)} "
            f"numbers of workers up to {counts[-1]}, wanted {LEAST_TO_EXTRAPOLATE}; `ridgeline simulate` "
            "predicts from what the links do"
        )


def _odd(points: Sequence[MeasuredPoint], found: Sequence[Law]) -> Iterator[str]:
    """Points that no smooth curve through the others has."""
    least = points[0].workers
    # Runs of the least number are what others are compared with; several of them scatter around their median.
    most = statistics.median(point.samples_per_s for point in points if point.workers == least)
    slower = [point for point in points if point.workers > least and point.samples_per_s < most]
    for point in slower:
        yield (
            f"{_whose(point)} do less than {units.counted(least, 'worker')} "
            f"({units.digits3(point.samples_per_s)} for {units.digits3(most)} samples/s): what they share or "
            "exchange costs more than they add, which is no serial part"
        )
    faster = [point for point in points if point.efficiency > 1.0 + OFF_CURVE]
    for point in faster:
        yield (
            f"{_whose(point)} do {point.speedup:.2f} times the work of one, more than there "
            "are workers: one of the runs was disturbed, or a worker's share fits into a cache that the "
            "whole does not"
        )
    nearest = min(found, key=lambda law: max(map(abs, law.misses)))
    for point, miss in zip(points, nearest.misses, strict=True):
        # What is told above bends all laws, so that points which are in order look off as well.
        if abs(miss) > OFF_CURVE and not (slower or faster):
            missed = f"{units.counted(point.workers, 'worker')} by {units.percent(abs(miss))}"
            yield (
                f"{point.run}: {nearest.name} misses {missed}; where a curve breaks, workers meet another "
                "link, or another plan was run"
            )


def _whose(point: MeasuredPoint) -> str:
    return f"{point.run}: {units.counted(point.workers, 'worker')}"
