"""Steps that end before all gradients have come: with how many held buckets, and whether a trial is worth it.

Such a step hides what is left of its exchanges behind the update and the next forward pass (see
`synchronisation.holding`). What is predicted of all numbers of held buckets decides which one is compared; so
a search gets one plan more for each number of workers, and none where the exchanges are hidden already.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ridgeline.errors import MachineError
from ridgeline.machine import Machine
from ridgeline.plan import Plan, Sync, cut_buckets
from ridgeline.planner.exchanges.buckets import is_worth_hiding
from ridgeline.planner.labels import label
from ridgeline.planner.ranking import Candidate
from ridgeline.simulator.model import rows_beside
from ridgeline.simulator.pricing.pieces import bucket_gradients
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import DEFAULT_ALGORITHM, HELD, MIB, UNCOMPRESSED, holds, num_held
from ridgeline.workload import CLIPPING, Workload

LEAST_HELD_GAIN = 0.02
"""Of a step; what is predicted to gain less is not worth a trial, as with other cuts of the same buckets."""
FINE_BYTES = (2 * MIB,)
"""Buckets of this size are compared besides those of the step that waits: the next forward pass goes on as
soon as the first layers are there. Source: ResNet-18 in nine buckets, at 100 and 400 Mbit/s (the guide)."""
NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Of held buckets that are compared; and all but the first."""
NOT_RUN = (
    "steps that end before all gradients have come (held buckets) were not compared: over NCCL they were "
    "never run"
)
UNTIMED = "steps that hold buckets are taken only where a trial has timed them"


def held_plans(
    machine: Machine,
    workloads: Mapping[int, Workload],
    fixed: Mapping[str, Any],
    plans: Sequence[Plan],
) -> list[Plan]:
    """For each number of workers at most one plan that holds buckets.

    `plans` are those that wait, with every cut of buckets that is compared.

    Cost: Some tens of simulations of milliseconds.
    """
    if "options" in fixed:
        return []
    found = []
    for workers, workload in workloads.items():
        waiting = [p for p in plans if p.workers == workers and _waits_for_all(p)]
        # One plan is enough to ask: what keeps a step from holding is in its trace, not in its knobs.
        if not waiting or why_not_held(workload, waiting[0]):
            continue
        if not is_worth_hiding(machine, workload, waiting[0]):
            continue
        seconds = [predicted_s(machine, workload, plan) for plan in waiting]
        waited_s = min(seconds)
        fastest = waiting[seconds.index(waited_s)]
        # Cuts of the fastest plan alone, or all threads and precisions would be simulated with each.
        cuts = [p.sync.bucket_bytes for p in waiting if _cut_like(fastest, p) == fastest]
        if "bucket_bytes" not in fixed:
            cuts.append(FINE_BYTES)
        held = fastest_held(machine, workload, fastest, cuts)
        if held is None:
            continue
        # Held steps need a trial of their own, so a small gain would cost more than it brings.
        if predicted_s(machine, workload, held) < waited_s * (1.0 - LEAST_HELD_GAIN):
            found.append(held)
    return found


def fastest_held(
    machine: Machine, workload: Workload, plan: Plan, cuts: Iterable[tuple[int, ...]]
) -> Plan | None:
    """The plan with the number of held buckets, and the cut of them, that is predicted to be fastest.

    The plan given waits; its other knobs stay as they are.

    None where no cut leaves two buckets.

    Raises:
        PlanError: the plan cannot hold buckets otherwise.
    """
    ways = [
        msgspec.structs.replace(plan, sync=sync)
        for bucket_bytes in dict.fromkeys(cuts)
        for sync in _holding(workload, plan, bucket_bytes)
    ]
    return min(ways, key=lambda way: predicted_s(machine, workload, way), default=None)


def why_not_held(workload: Workload, plan: Plan) -> str:
    """What keeps a step from holding buckets, as far as its trace tells; empty where nothing does."""
    if workload.device == "cuda":
        return "over NCCL it was never run"
    update = workload.phase("optimizer")
    # The norm is of all gradients, and the held ones are not there when the update begins.
    if any(op.module == CLIPPING for op in update):
        return "gradients are clipped by the norm of all of them"
    # A late update sees one bucket: whatever joins parameters would compute something else.
    if any(op.family in ("reduction", "matmul") or "_fused_" in op.name for op in update):
        return "the optimizer looks at more than one element, or at all parameters"
    if rows_beside(workload, plan):
        return "some gradients are sparse"
    return ""


def only_timed(candidates: Sequence[Candidate]) -> tuple[list[Candidate], list[str]]:
    """The candidates without those that hold buckets and were not tried, and a note about these.

    Only a trial tells whether the script's optimizer and model can be updated so.
    """
    left_out = [
        c for c in candidates if holds(c.plan.sync) and c.measured is None and not c.failure
    ]
    kept = [c for c in candidates if c not in left_out]
    return kept, [f"left out: {label(c.plan)}: {UNTIMED}" for c in left_out]


def is_due_beside(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether a candidate may be tried: one that holds buckets, only behind one that waits."""
    return not holds(candidate.plan.sync) or any(
        other.measured is not None
        and other.plan.workers == candidate.plan.workers
        and not holds(other.plan.sync)
        for other in candidates
    )


def uncompared_held(fixed: Mapping[str, Any], device: str, workers: Collection[int]) -> list[str]:
    """A note where steps that hold buckets are not compared though they could be faster."""
    is_open = (
        "options" not in fixed and fixed.get("algorithm", DEFAULT_ALGORITHM) == DEFAULT_ALGORITHM
    )
    return [NOT_RUN] if device == "cuda" and is_open and max(workers) > 1 else []


def predicted_s(machine: Machine, workload: Workload, plan: Plan) -> float:
    """Seconds of a step; infinite where the machine's profile does not tell."""
    # Infinite rather than an error: plans that can be predicted are compared all the same.
    try:
        return simulate(machine, workload, plan, details=False).step_ns * 1e-9
    except MachineError:
        return math.inf


def _waits_for_all(plan: Plan) -> bool:
    """Whether a plan of several workers could hold buckets, and holds none."""
    sync = plan.sync
    is_plain = (sync.algorithm, sync.compression) == (DEFAULT_ALGORITHM, UNCOMPRESSED)
    return (
        plan.workers > 1
        and plan.execution == "eager"
        and plan.optimizer == "as-is"
        and is_plain
        and sync.every == 1
        and not sync.options
    )


def _holding(workload: Workload, plan: Plan, bucket_bytes: tuple[int, ...]) -> Iterator[Sync]:
    """The exchange of a plan in these buckets, with every number of them held that is compared."""
    sync = msgspec.structs.replace(plan.sync, bucket_bytes=bucket_bytes)
    sizes = [(p.num_bytes, p.dtype) for p in bucket_gradients(workload, sync)]
    num_buckets = len(cut_buckets(sizes, bucket_bytes)) if sizes else 0
    for number in sorted({*NUMBERS, num_buckets - 1}):
        # The first bucket is never held: it carries the signals of the workers.
        if 0 < number < num_buckets:
            held = msgspec.structs.replace(sync, options={HELD.name: number})
            assert num_held(held, num_buckets) == number
            yield held


def _cut_like(other: Plan, plan: Plan) -> Plan:
    """The plan in the buckets of another one."""
    sync = msgspec.structs.replace(plan.sync, bucket_bytes=other.sync.bucket_bytes)
    return msgspec.structs.replace(plan, sync=sync)
