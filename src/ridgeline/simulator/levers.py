"""Levers: which part of the machine, were it faster, makes a step faster, by how much, and how surely."""

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.codec import Value
from ridgeline.laws.resampling import QUARTILES_IN_DEVIATIONS, interval
from ridgeline.machine import Ceiling, Machine, Quantity
from ridgeline.plan import Plan
from ridgeline.simulator.step import simulate
from ridgeline.simulator.what_if import what_if
from ridgeline.workload import Workload

DRAWS = 20
"""Machines that are drawn for an interval; of each, the step is predicted as it is and with the lever."""
DOUBLED = ("compute", "memory", "launch", "communication")


class Lever(Value, frozen=True, kw_only=True):
    """What faster parts make of a step: `gain` is its time now over its time then.

    `low` and `high` bound nine in ten of the gains on machines that are drawn from the measured one's spread.
    """

    factors: dict[str, float]
    step_s: float
    gain: float
    low: float
    high: float


def levers(
    machine: Machine,
    workload: Workload,
    plan: Plan,
    questions: Sequence[Mapping[str, float]] = tuple({part: 2.0} for part in DOUBLED),
    *,
    seed: int = 0,
) -> tuple[Lever, ...]:
    """The gain of each set of faster parts; by default each part twice as fast by itself.

    Every number of the machine is drawn around its median as wide as its quartiles are apart, by itself. The
    step is predicted on the same drawn machine with the lever and without, so that what makes both slow says
    nothing about the gain. What the model gets wrong is in no interval.

    Args:
        machine: The measured machine.
        workload: The step of one worker.
        plan: How it is run.
        questions: Part to factor, as `what_if` takes them.
        seed: Of the drawn machines; the same seed gives the same result.

    Raises:
        MachineError: what `what_if` and `simulate` raise.
        PlanError: what `simulate` raises.

    Cost: 21 predictions a question, and 21 more: a second for ResNet-18 and four questions.
    """
    drawn = _machines(machine, seed)
    plain = [_step_s(one, workload, plan) for one in drawn]
    return tuple(
        _lever(
            factors,
            plain,
            [_step_s(what_if(one, factors, workload), workload, plan) for one in drawn],
        )
        for factors in questions
    )


def elsewhere(
    machine: Machine, other: Machine, workload: Workload, plan: Plan, *, seed: int = 0
) -> Lever:
    """What another machine makes of a step; both are drawn around their numbers, see `levers`.

    Args:
        machine: The measured machine.
        other: Another one, with the plan's setting; operators that were not timed there cost what its
            ceilings tell.
        workload: The step of one worker.
        plan: How it is run.
        seed: Of the drawn machines.

    Raises:
        MachineError: what `simulate` raises.
        PlanError: what `simulate` raises.
    """
    steps = (
        [_step_s(one, workload, plan) for one in _machines(each, seed + number)]
        for number, each in enumerate((machine, other))
    )
    return _lever({}, *steps)


def _machines(machine: Machine, seed: int) -> list[Machine]:
    """The machine, and others drawn from its spread."""
    noise = random.Random(seed)
    return [machine, *(_drawn(machine, noise) for _ in range(DRAWS))]


def _lever(factors: Mapping[str, float], plain: Sequence[float], then: Sequence[float]) -> Lever:
    """From the steps on each machine, the measured one first."""
    gains = [_ratio(now, after) for now, after in zip(plain, then, strict=True)]
    low, high = interval(gains[1:])
    return Lever(
        factors=dict(factors),
        step_s=then[0],
        gain=gains[0],
        low=min(low, gains[0]),
        high=max(high, gains[0]),
    )


def _step_s(machine: Machine, workload: Workload, plan: Plan) -> float:
    return 1e-9 * simulate(machine, workload, plan, details=False).step_ns


def _ratio(now_s: float, then_s: float) -> float:
    """A step that takes no time any more is as many times as fast as nanoseconds tell."""
    return now_s / max(then_s, 1e-9) if now_s else 1.0


def _drawn(value: Any, noise: random.Random) -> Any:
    """A copy with every measured number drawn anew, and what hangs on it in proportion."""
    if isinstance(value, Quantity):
        return value.times(_factor(value, noise))
    if isinstance(value, Ceiling):
        factor = _factor(value.rate, noise)
        curve = tuple(
            msgspec.structs.replace(point, rate=point.rate * factor) for point in value.curve
        )
        return msgspec.structs.replace(value, rate=value.rate.times(factor), curve=curve)
    if isinstance(value, tuple):
        return tuple(_drawn(part, noise) for part in value)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return msgspec.structs.replace(
            value,
            **{
                name: _drawn(field, noise)
                for name, field in fields.items()
                if isinstance(field, (Quantity, msgspec.Struct, tuple))
            },
        )
    return value


def _factor(quantity: Quantity, noise: random.Random) -> float:
    """What a number is multiplied by; 1 where it has no spread."""
    if not 0.0 < quantity.low < quantity.high:
        return 1.0
    width = math.log(quantity.high / quantity.low) / QUARTILES_IN_DEVIATIONS
    return math.exp(noise.gauss(0.0, width))
