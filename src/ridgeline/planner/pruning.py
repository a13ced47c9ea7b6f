"""What rules a plan out before it is simulated: too little memory, gradients that nobody can exchange."""

from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.memory import fits, memory_capacity_bytes, peak_memory_bytes
from ridgeline.workload import Parameter, Workload


class Pruned(NamedTuple):
    """A plan that was ruled out before it was simulated, why, and what would let it in."""

    plan: Plan
    reason: str
    advice: str


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
    while not fits(machine, workload, candidate):
        parts = candidate.accumulate * 2
        if not may_split or parts > workload.samples:
            need = peak_memory_bytes(workload, candidate)
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
    if plan.workers == 1:
        return None
    for parameter in workload.gradients:
        if _is_sparse(workload, parameter):
            return Pruned(
                plan,
                f"has a sparse gradient for {parameter.name}, which workers do not exchange",
                "make its layer with sparse=False, or use one worker",
            )
    return None


def _is_sparse(workload: Workload, parameter: Parameter) -> bool:
    """Whether the op that completes the gradient deals in a tensor of its shape without strides."""
    if parameter.ready_op < 0 or not parameter.shape:
        return False
    op = workload.ops[parameter.ready_op]
    return any(s.shape == parameter.shape and not s.stride for s in (*op.inputs, *op.outputs))


def _roomier(plan: Plan, device: str) -> str:
    """What leaves a worker more memory: on a CPU never more workers, since all share that of one host."""
    if device == "cuda":
        return "reduce the batch size or use more devices"
    if plan.workers == 1:
        return "reduce the batch size"
    return "reduce the batch size, or the number of workers, which share the host's memory"
