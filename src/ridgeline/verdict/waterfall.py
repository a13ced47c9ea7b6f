"""The way from the physical limit to the measured step, in parts that add up.

The measured step is first divided by what its lanes did, by priority: computing, then communication, then
waiting for input and other time between steps, then the rest. The computing is divided further by the
operators of the prediction: what the FLOP need at the ceiling, what memory adds, what kernels lose, what
launching costs.
"""

from typing import NamedTuple

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.model import setting_of
from ridgeline.simulator.pricing.pieces import price_step
from ridgeline.timeline import Timeline, covered_ns
from ridgeline.workload import Workload

IDEAL = "ideal compute"
MEMORY = "memory-bound work"
KERNEL = "kernel inefficiency"
LAUNCH = "launch gaps"
EXPOSED = "exposed communication"
INPUT = "input wait"
BETWEEN = "between steps"
OTHER = "other"
LEAST_TOLD_NS = 1000
"""Less is left by rounding times to whole nanoseconds, and explains nothing."""
MOST_MISS = 2.0
"""Ceilings that so much more was measured than, such as those of a busy machine, explain nothing."""


class Part(Value, frozen=True, kw_only=True):
    """One part of the measured step; all parts of a step add up to it exactly."""

    name: str
    ns: int
    why: str = ""

    @property
    def seconds(self) -> float:
        """The part in seconds."""
        return self.ns * 1e-9


class Estimate(NamedTuple):
    """Nanoseconds that the computing of a step needs, as far as a prediction shows."""

    ideal_ns: int
    memory_ns: int
    kernel_ns: int
    launch_ns: int
    slowed_ns: int
    """Computing made slower by communication beside it."""


NOTHING = Estimate(0, 0, 0, 0, 0)
"""What is known of computing where nothing is."""


class Waterfall(NamedTuple):
    """The parts, the notes on how they were found, and the limit (None when that is unknown)."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...]
    limit_ns: int | None


def waterfall(
    predicted: Timeline,
    measured: Timeline,
    machine: Machine | None = None,
    workload: Workload | None = None,
) -> Waterfall:
    """The parts of the measured step.

    Args:
        predicted: Its operator spans say what computing needs.
        measured: Its frames are divided.
        machine: With `workload`, gives the same when `predicted` has no operator spans.
        workload: See `machine`.

    Source: priority breakdown as in the TensorBoard profiler plugin, so that parts sum to wall time.
    """
    compute, communication, waiting, rest = divide(measured)
    waited = _waited(measured, waiting)
    whose = "code of your own" if is_fed(measured) else "what passed there was not measured"
    notes: list[str] = []
    estimate = estimate_of(predicted) or _priced(measured, machine, workload, notes)
    limit = None
    if estimate is None:
        notes.append("it is unknown what limits the operators: all computing counts as other")
        estimate = NOTHING
    elif (limit := estimate.ideal_ns + estimate.memory_ns) > MOST_MISS * compute:
        notes.append(
            f"computing took {units.nanoseconds(compute)} where the profile allows no less than "
            f"{units.nanoseconds(limit)}: its ceilings are none, all computing counts as other; measure "
            "again with `ridgeline measure --refresh`"
        )
        estimate, limit = NOTHING, None
    fitted = _fit(estimate, compute, notes)
    unexplained = compute - sum(fitted)
    # A reason within the unexplained part and no part of its own, so that the parts add up.
    slowed = min(estimate.slowed_ns, unexplained)
    why_other = f"{units.nanoseconds(slowed)} of it is computing that communication slows down"
    parts = (
        Part(name=IDEAL, ns=fitted[0], why="FLOP at the measured ceilings"),
        Part(name=MEMORY, ns=fitted[1], why="bytes that cannot move faster, beyond the FLOP"),
        Part(name=KERNEL, ns=fitted[2], why="kernels below the roofline"),
        Part(name=LAUNCH, ns=fitted[3], why="issuing operators while nothing computes"),
        Part(name=EXPOSED, ns=communication, why="communication that computing does not hide"),
        Part(name=INPUT, ns=waited, why="no batch yet"),
        Part(name=BETWEEN, ns=waiting - waited, why=f"from a step's end to the next call: {whose}"),
        Part(name=OTHER, ns=rest + unexplained, why=why_other if slowed >= LEAST_TOLD_NS else ""),
    )
    # As it was fitted: a limit above the measured step would be a share of more than all of it.
    if limit is not None:
        limit = fitted[0] + fitted[1]
    return Waterfall(parts, tuple(notes), limit)


def divide(timeline: Timeline) -> tuple[int, int, int, int]:
    """Nanoseconds of the step that compute, else communicate, else wait for input, else none of it.

    The first that applies counts, so the four add up to the step.
    """
    step_ns = timeline.step_ns
    compute = [s for s in timeline.lane("compute") if s.name != "wait"]
    communicating = [
        *timeline.lane("communication"),
        *(s for s in timeline.lane("compute") if s.name == "wait"),
    ]
    # `wait` blocks the host, so an `input` frame cannot run beneath it.
    loading = [s for s in timeline.frames if s.lane in ("host", "loader", "copy-in", "disk")]
    first = covered_ns(compute, step_ns)
    both = covered_ns([*compute, *communicating], step_ns)
    all_three = covered_ns([*compute, *communicating, *loading], step_ns)
    return first, both - first, all_three - both, step_ns - all_three


def is_fed(measured: Timeline) -> bool:
    """Whether the waiting for batches was measured, by a feed."""
    return measured.origin == "predicted" or "waited_ns" in measured.counters


def _waited(measured: Timeline, waiting_ns: int) -> int:
    """What of the time between steps is waiting for input, as far as it is known."""
    # Only the host's frame between steps includes code of the user; other lanes load, and nothing else.
    if measured.origin == "predicted" or not any(s.lane == "host" for s in measured.frames):
        return waiting_ns
    # The counter is the usual wait of all steps, which may exceed the gap of this one.
    return min(waiting_ns, round(measured.counters.get("waited_ns", 0.0)))


def estimate_of(predicted: Timeline) -> Estimate | None:
    """What the operator spans of a prediction say; None when there are none."""
    details = [s for s in predicted.spans if s.detail and s.lane == "compute"]
    known = [s for s in details if "roofline_ns" in s.attributes]
    if not known:
        return None
    ideal = memory = kernel = launch = slowed = 0
    for span in known:
        values = {
            name: int(span.attributes.get(name, 0))
            for name in ("alone_ns", "ideal_ns", "roofline_ns", "dispatch_ns")
        }
        lost = max(0, values["alone_ns"] - values["roofline_ns"])
        # Dispatch can explain no more than what the operator lost.
        issuing = min(lost, values["dispatch_ns"])
        ideal += values["ideal_ns"]
        memory += values["roofline_ns"] - values["ideal_ns"]
        launch += issuing
        kernel += lost - issuing
        slowed += max(0, span.duration_ns - values["alone_ns"])
    frames = [s for s in predicted.lane("compute") if s.name != "wait"]
    # What frames last beyond their operators is time in which the device waited for launches.
    gaps = sum(s.duration_ns for s in frames) - sum(s.duration_ns for s in details)
    return Estimate(ideal, memory, kernel, launch + max(0, gaps), slowed)


def _priced(
    measured: Timeline, machine: Machine | None, workload: Workload | None, notes: list[str]
) -> Estimate | None:
    """The estimate from the price list, when the prediction carries no operators."""
    if machine is None or workload is None:
        return None
    workers = measured.workers
    try:
        # A profile has settings that share the cores of a host out, and no others.
        setting = setting_of(machine, workload, Plan(workers=workers))
        priced = price_step(machine, workload, setting)
    except MachineError as error:
        notes.append(f"the machine profile does not say what limits the operators: {error}")
        return None
    notes += priced.notes
    ideal = memory = kernel = launch = 0.0
    for piece in (*priced.forward, *priced.backward, *priced.optimizer):
        lost = max(0.0, piece.lane_s - piece.roofline_s)
        ideal += piece.ideal_s
        memory += piece.roofline_s - piece.ideal_s
        launch += min(lost, piece.fixed_s)
        kernel += max(0.0, lost - piece.fixed_s)
    return Estimate(
        ideal_ns=round(1e9 * ideal),
        memory_ns=round(1e9 * memory),
        kernel_ns=round(1e9 * kernel),
        launch_ns=round(1e9 * launch),
        slowed_ns=0,
    )


def _fit(estimate: Estimate, compute_ns: int, notes: list[str]) -> tuple[int, int, int, int]:
    """The four parts of computing, made no more than was measured.

    What is least certain gives way first: losses, and only then the limit itself.
    """
    ideal, memory, kernel, launch, _ = estimate
    limit, losses = ideal + memory, kernel + launch
    if limit + losses <= compute_ns:
        return ideal, memory, kernel, launch
    if limit <= compute_ns:
        share = (compute_ns - limit) / losses
        notes.append(
            f"predicted losses exceed the measured computing: scaled by {share:.2f} to fit"
        )
        # Rounded down, so that the sum stays within the computing; what is left counts as other.
        return ideal, memory, int(kernel * share), int(launch * share)
    share = compute_ns / limit
    notes.append(
        f"computing was measured faster than the ceilings allow: the limit was scaled by {share:.2f}"
    )
    return int(ideal * share), int(memory * share), 0, 0
