"""`PredictedScaling`: how a step is predicted to scale, the laws through that, and what would change it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.laws.resampling import LEAST_TO_EXTRAPOLATE
from ridgeline.machine import Machine
from ridgeline.machine.cluster import Level
from ridgeline.plan import Plan
from ridgeline.simulator.curves.levers import Lever
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.verdict.scaling import fitted_law, names_of_laws
from ridgeline.verdict.scaling_notes import OFF_CURVE
from ridgeline.verdict.scaling_nouns import Law, Regime

WORTH_WHILE = 0.8
"""Efficiency below which a curve is said to fall off. Source: a convention, not a law."""


class OtherCurve(Value, frozen=True, kw_only=True):
    """The same step with the same plan on another machine: `question` says on which."""

    question: str
    points: tuple[ScalingPoint, ...]


class PredictedScaling(Noun, frozen=True, kw_only=True):
    """How a step is predicted to scale; made by `predicted_scaling`.

    `samples` are those of the whole batch where the workers share one, of each worker where each has its
    own. `levers` are of the largest number of workers.
    """

    kind: ClassVar[str] = "predicted-scaling"

    title: str
    regime: Regime
    samples: int
    machine: str
    """What it is predicted for, in a few words."""
    plan: Plan
    points: tuple[ScalingPoint, ...]
    laws: tuple[Law, ...] = ()
    others: tuple[OtherCurve, ...] = ()
    levers: tuple[Lever, ...] = ()
    cluster: tuple[Level, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def falls_off(self) -> tuple[int | None, int] | None:
        """The last number of workers before efficiency falls below `WORTH_WHILE`, and the first after.

        None where it never does; the first is None where it is so from the least number on.
        """
        before = None
        for point in self.points:
            if point.efficiency < WORTH_WHILE:
                return before, point.workers
            before = point.workers
        return None


def predicted_scaling(
    title: str,
    regime: Regime,
    samples: int,
    machine: Machine,
    plan: Plan,
    points: Sequence[ScalingPoint],
    *,
    others: Mapping[str, Sequence[ScalingPoint]] | None = None,
    levers: Sequence[Lever] = (),
) -> PredictedScaling:
    """The curve with the laws through it, and what has to be known to read it.

    Laws are fitted to six numbers of workers or more. They have no intervals: predictions do not scatter
    around a law as measurements do, and what a law misses of them is no noise.

    Args:
        title: The task.
        regime: Whether the workers share one batch.
        samples: Of the whole batch then, of each worker otherwise.
        machine: What it was predicted for.
        plan: How the step is run.
        points: From `scaling_curve`, ascending.
        others: Question to the curve on another machine.
        levers: At the largest number of workers.

    Raises:
        LawError: a predicted rate is no number above 0.
    """
    counts = [float(point.workers) for point in points]
    rates = [point.samples_per_s for point in points]
    found: tuple[Law, ...] = ()
    if len(counts) >= LEAST_TO_EXTRAPOLATE:
        names = names_of_laws(regime, counts)
        found = tuple(fitted_law(name, counts, rates) for name in names)
    return PredictedScaling(
        title=title,
        regime=regime,
        samples=samples,
        machine=_described(machine),
        # A curve is of the settings; the reasons for them stay with the plan.
        plan=plan.settings,
        points=tuple(points),
        laws=found,
        others=tuple(
            OtherCurve(question=question, points=tuple(curve))
            for question, curve in (others or {}).items()
        ),
        levers=tuple(levers),
        cluster=machine.cluster,
        notes=(*_limits(points, found), *_off_curve(points, found), *_assumed(points)),
    )


def _limits(points: Sequence[ScalingPoint], found: Sequence[Law]) -> Iterator[str]:
    """What the numbers of workers do not say."""
    if not found:
        yield (
            f"no law is drawn: {len(points)} numbers of workers are predicted, a law needs "
            f"{LEAST_TO_EXTRAPOLATE}; give more to --devices"
        )
    least = points[0].workers
    if least > 1:
        yield (
            f"speed-ups are those over {least} workers, each taken as one of {least} that lose nothing"
        )
    yield from superlinear(points)


def superlinear(points: Sequence[ScalingPoint]) -> Iterator[str]:
    """What is to be said of the most efficient number of workers where it does more than its share."""
    least = points[0].workers
    best = max(points, key=lambda point: point.efficiency)
    if best.efficiency > 1.0 + OFF_CURVE:
        yield (
            f"{best.workers} workers are predicted to do {best.speedup:.2f} times the work of one, more than "
            f"there are workers: with other threads, or a smaller batch, each is faster than {least} alone"
        )


def _off_curve(points: Sequence[ScalingPoint], found: Sequence[Law]) -> Iterator[str]:
    """Points that even the nearest law is far from."""
    if not found:
        return
    nearest = min(found, key=lambda law: max(map(abs, law.misses)))
    for point, miss in zip(points, nearest.misses, strict=True):
        if abs(miss) > OFF_CURVE:
            yield (
                f"{nearest.name} misses {units.counted(point.workers, 'worker')} by "
                f"{units.percent(abs(miss))}: where a curve breaks, workers meet another link or fewer "
                "threads"
            )


def _described(machine: Machine) -> str:
    gpus = [device.name for device in machine.devices if device.kind == "cuda"]
    many = "".join(f", {gpus.count(name)} x {name}" for name in dict.fromkeys(gpus))
    return (
        f"{machine.host.name}: {machine.host.processor}, {machine.host.cores} cores{many}; "
        f"torch {machine.host.torch}; measured on {machine.measured_at[:10]}; fingerprint "
        f"{machine.fingerprint}"
    )


def _assumed(points: Sequence[ScalingPoint]) -> list[str]:
    """What was assumed, each once: notes that differ in the number of workers alone are one with `N`."""
    whose: dict[str, dict[int, str]] = {}
    for point in points:
        for note in point.notes:
            # Notes name what was asked for first, and what stands in for it after.
            alike = re.sub(rf"\b{point.workers}(?= workers| x )", "N", note, count=1)
            whose.setdefault(alike, {}).setdefault(point.workers, note)
    return [
        _told(alike, notes, is_of_all=len(notes) == len(points)) for alike, notes in whose.items()
    ]


def _told(alike: str, notes: Mapping[int, str], *, is_of_all: bool) -> str:
    """One note for all numbers of workers that have it."""
    first = next(iter(notes.values()))
    if len(notes) == 1 and first != alike:
        return first  # which names the number
    if is_of_all and first == alike:
        return alike
    counts = ", ".join(map(str, notes))
    return f"{alike}, for {'N = ' if first != alike else ''}{counts}"
