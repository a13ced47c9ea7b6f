"""Scaling curves: the predicted step for several numbers of workers, and how sure that is."""

import math
import statistics
from collections.abc import Mapping, Sequence

from msgspec import structs

from ridgeline.codec import Value
from ridgeline.errors import PlanError
from ridgeline.laws.order_statistics import MOST_SPREAD
from ridgeline.laws.resampling import interval
from ridgeline.machine import Machine
from ridgeline.machine.stragglers import Stragglers
from ridgeline.plan import Plan
from ridgeline.simulator.curves.spread import drawn_machines
from ridgeline.simulator.step import simulate
from ridgeline.workload import Workload


class ScalingPoint(Value, frozen=True, kw_only=True):
    """Prediction for one number of workers.

    `speedup` compares samples per second with those of the smallest number, per worker of it;
    `efficiency` is the speed-up per worker. `low_s` and `high_s` bound nine in ten of the steps on machines
    that are drawn from the measured one's spread; they are None where none were drawn.
    """

    workers: int
    step_s: float
    samples_per_s: float
    speedup: float
    efficiency: float
    low_s: float | None = None
    high_s: float | None = None
    notes: tuple[str, ...] = ()


def scaling_curve(
    machine: Machine,
    workload: Workload | Mapping[int, Workload],
    plan: Plan,
    world_sizes: Sequence[int],
    *,
    with_intervals: bool = False,
    seed: int = 0,
) -> tuple[ScalingPoint, ...]:
    """Predicted speed for several numbers of workers.

    Args:
        machine: The measured machine, which may describe a cluster of such hosts.
        workload: One workload: every worker keeps its batch (weak scaling). A mapping by number of
            workers: what each worker does at that number (strong scaling, when the global batch is one).
        plan: Everything but the number of workers (and threads) is kept.
        world_sizes: Numbers of workers.
        with_intervals: Predict each step on drawn machines, too; see `drawn_machines`.
        seed: Of the drawn machines.

    Raises:
        PlanError: no number is given, or the mapping lacks one.
        MachineError: the profile lacks what a number of workers needs.

    Cost: One prediction a number, with intervals 21, of 10 ms for ResNet-18; they cost the same for 10,000
        workers as for 2.
    """
    if not world_sizes:
        raise PlanError(
            "wanted numbers of workers for a scaling curve, got none; give at least one"
        )
    machines = drawn_machines(machine, seed) if with_intervals else [machine]
    points: list[ScalingPoint] = []
    base = 0.0
    for workers in sorted(set(world_sizes)):
        load = _load(workload, workers)
        timelines = [
            simulate(each, load, plan, world_size=workers, details=False) for each in machines
        ]
        step_s, *drawn_s = [timeline.step_ns * 1e-9 for timeline in timelines]
        rate = workers * load.samples / step_s if step_s else 0.0
        # The smallest number is the first in the order, and is compared with itself.
        base = base or rate / workers
        speedup = rate / base if base else 0.0
        low_s, high_s = interval(drawn_s) if drawn_s else (None, None)
        points.append(
            ScalingPoint(
                workers=workers,
                step_s=step_s,
                samples_per_s=rate,
                speedup=speedup,
                efficiency=speedup / workers,
                low_s=None if low_s is None else min(low_s, step_s),
                high_s=None if high_s is None else max(high_s, step_s),
                notes=timelines[0].notes,
            )
        )
    return tuple(points)


def differing_as_measured(
    machine: Machine, workload: Workload, plan: Plan, *, seed: int = 0
) -> Machine:
    """The machine with devices that differ as predictions of one of them do on drawn machines.

    That is the spread of what was measured, operator by operator, by itself: devices whose whole step is
    faster or slower at times differ by more.

    What the machine says of unequal devices is replaced. Arguments as of `levers`.

    Raises:
        MachineError: what `simulate` raises.
        PlanError: what `simulate` raises.
    """
    # Alone, so that what differs is computing and not what workers wait for.
    alone = [
        simulate(each, workload, plan, world_size=1, details=False)
        for each in drawn_machines(machine, seed)[1:]
    ]
    logarithms = [math.log(timeline.step_ns) for timeline in alone if timeline.step_ns]
    spread = statistics.stdev(logarithms) if len(logarithms) > 1 else 0.0
    return structs.replace(machine, stragglers=Stragglers(spread=min(spread, MOST_SPREAD)))


def _load(workload: Workload | Mapping[int, Workload], workers: int) -> Workload:
    """What each of so many workers does; a PlanError where a mapping lacks that number."""
    if isinstance(workload, Workload):
        return workload
    if workers not in workload:
        raise PlanError(
            f"wanted a workload for {workers} workers, got workloads for {sorted(workload)}; trace "
            "the step with that worker's batch"
        )
    return workload[workers]
