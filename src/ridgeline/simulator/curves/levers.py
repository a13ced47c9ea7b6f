"""Levers: which part of the machine, were it faster, makes a step faster, by how much, and how surely."""

from collections.abc import Mapping, Sequence

from ridgeline.codec import Value
from ridgeline.laws.resampling import interval
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.curves.spread import drawn_machines
from ridgeline.simulator.curves.what_if import MOST_FACTOR, what_if
from ridgeline.simulator.step import simulate
from ridgeline.workload import Workload

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
    questions: Sequence[Mapping[str, float]] | None = None,
    *,
    seed: int = 0,
) -> tuple[Lever, ...]:
    """The gain of each set of faster parts.

    Every number of the machine is drawn around its median as wide as its quartiles are apart, by itself. The
    step is predicted on the same drawn machine with the lever and without, so that what makes both slow says
    nothing about the gain. What the model gets wrong is in no interval.

    Args:
        machine: The measured machine.
        workload: The step of one worker.
        plan: How it is run.
        questions: Part to factor, as `what_if` takes them; None asks about each part twice as fast by itself,
            and about devices that are all alike where the machine describes others.
        seed: Of the drawn machines; the same seed gives the same result.

    Raises:
        MachineError: what `what_if` and `simulate` raise.
        PlanError: what `simulate` raises.

    Cost: 21 predictions a question, and 21 more: a second for ResNet-18 and four questions.
    """
    if questions is None:
        questions = [{part: 2.0} for part in DOUBLED]
        # Equal devices have nothing to gain from being made equal.
        if machine.stragglers.factor(plan.workers) > 1.0:
            questions.append({"stragglers": MOST_FACTOR})
    drawn = drawn_machines(machine, seed)
    plain = [_step_s(one, workload, plan) for one in drawn]
    found: list[Lever] = []
    for factors in questions:
        faster = [what_if(one, factors, workload) for one in drawn]
        found.append(_lever(factors, plain, [_step_s(one, workload, plan) for one in faster]))
    return tuple(found)


def elsewhere(
    machine: Machine, other: Machine, workload: Workload, plan: Plan, *, seed: int = 0
) -> Lever:
    """What another machine makes of a step; both are drawn around their numbers, see `levers`.

    Of one measurement that was edited the same is drawn, so that what was left as it was says nothing about
    the gain; two measurements are drawn apart. The other machine needs the plan's setting; operators not
    timed there cost what its ceilings tell. Other arguments as of `levers`.

    Raises:
        MachineError: what `simulate` raises.
        PlanError: what `simulate` raises.
    """
    measurements = [(each.fingerprint, each.measured_at) for each in (machine, other)]
    other_seed = seed if measurements[0] == measurements[1] else seed + 1
    steps = (
        [_step_s(one, workload, plan) for one in drawn_machines(each, each_seed)]
        for each, each_seed in ((machine, seed), (other, other_seed))
    )
    return _lever({}, *steps)


def _lever(factors: Mapping[str, float], plain: Sequence[float], then: Sequence[float]) -> Lever:
    """From the steps on each machine, the measured one first."""
    # A step that takes no time any more is limited to the resolution of a nanosecond.
    steps = zip(plain, then, strict=True)
    gains = [now_s / max(then_s, 1e-9) if now_s else 1.0 for now_s, then_s in steps]
    # Without the first: the measured machine was not drawn.
    low, high = interval(gains[1:])
    return Lever(
        factors=dict(factors),
        step_s=then[0],
        gain=gains[0],
        # Few draws may all lie on one side of the machine as measured.
        low=min(low, gains[0]),
        high=max(high, gains[0]),
    )


def _step_s(machine: Machine, workload: Workload, plan: Plan) -> float:
    return 1e-9 * simulate(machine, workload, plan, details=False).step_ns
