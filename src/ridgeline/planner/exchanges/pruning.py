"""What rules a plan out before it is simulated: too little memory, gradients that cannot be exchanged."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.exchanges import PERMISSION
from ridgeline.simulator.memory import fits, memory_capacity_bytes, peak_memory_bytes
from ridgeline.simulator.pricing.dataflow import element_bytes
from ridgeline.simulator.pricing.pieces import bucket_gradients
from ridgeline.simulator.pricing.sparse_rows import rows_refused
from ridgeline.synchronisation import offered_compressions, why_losing
from ridgeline.workload import Workload


class Pruned(NamedTuple):
    """A plan that was ruled out before it was simulated, why, and what would let it in."""

    plan: Plan
    reason: str
    advice: str
    is_of_workload: bool = False
    """Whether every plan of as many workers is ruled out with it, for which one is enough."""


def fitting(machine: Machine, workload: Workload, plan: Plan, *, may_split: bool) -> Plan | Pruned:
    """The plan with as many micro-batches as its memory needs, where they may be chosen."""
    samples = max(1, workload.samples)
    if plan.accumulate > samples:
        return Pruned(
            plan,
            f"has accumulate={plan.accumulate}, more than the {samples} samples of a worker's batch",
            "lower accumulate",
        )
    candidate = plan
    # Doubled, not raised by one: activations fall with 1/n, so few tries reach what fits.
    while not fits(machine, workload, candidate):
        parts = candidate.accumulate * 2
        if not may_split or parts > workload.samples:
            need = peak_memory_bytes(workload, candidate, machine)
            room = memory_capacity_bytes(machine, workload, candidate)
            return Pruned(
                candidate,
                f"needs {units.num_bytes(need)} of memory per worker, of which {units.num_bytes(room)} are "
                "usable",
                _roomier(candidate, workload.device),
            )
        candidate = msgspec.structs.replace(candidate, accumulate=parts)
    return candidate


def exchanging(workload: Workload, plan: Plan) -> Pruned | None:
    """Why the workers of a plan could not exchange their gradients; None where they can."""
    refused = rows_refused(workload, plan)
    if refused is None:
        return None
    return Pruned(plan, refused.reason, refused.advice, is_of_workload=True)


def losing(
    workload: Workload, plan: Plan, fixed: Mapping[str, Any], allow: Collection[str]
) -> dict[str, Pruned]:
    """Compressions that send no fewer bytes of these gradients, whatever else the plan says, by their words.

    None where the user named one.

    The gradients count as one bucket, which compressions favour.
    """
    if "compression" in fixed or PERMISSION not in allow:
        return {}
    # With the fixed interval, since then parameters travel, sparse ones in dense form too.
    parameters = bucket_gradients(workload, Sync(every=fixed.get("every", 1)))
    # The widest dtype counts: in it the plain exchange is largest, which favours compressions.
    each = max((element_bytes(p.dtype) for p in parameters), default=1)
    num_elements = sum(p.num_bytes for p in parameters) // each
    shapes = [p.shape for p in parameters]
    found = {}
    for name in offered_compressions(workload.device):
        # With the options that are fixed; those of other compressions are not looked at.
        way = Sync(compression=name, options=fixed.get("options", {}))
        reason = why_losing(way, num_elements, each, plan.workers, shapes)
        if reason:
            left_out = Plan(workers=plan.workers, sync=Sync(compression=name))
            found[name] = Pruned(left_out, reason, f"fix compression={name!r}")
    return found


def _roomier(plan: Plan, device: str) -> str:
    """What leaves a worker more memory: on a CPU never more workers, since all share that of one host."""
    if device == "cuda":
        return "reduce the batch size or use more devices"
    if plan.workers == 1:
        return "reduce the batch size"
    return "reduce the batch size, or the number of workers, which share the host's memory"
