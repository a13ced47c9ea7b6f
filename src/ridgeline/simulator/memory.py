"""Predicted peak memory of a workload under a plan, and whether it fits.

Live bytes come from the trace. What the allocator rounds up, libraries reserve and other programs hold
is not traced, so a share of the device is kept free.
"""

from collections.abc import Collection, Sequence

from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.dataflow import element_bytes
from ridgeline.simulator.sparse_rows import sent_by_rows
from ridgeline.synchronisation import replaces_update, state_bytes, state_parts
from ridgeline.workload import MemoryPoint, Workload

USABLE_SHARE = 0.9
"""Share of a device's memory that a plan may fill.

Source: assumed; allocator rounding, CUDA context and library workspaces take up to a tenth.
"""


def peak_memory_bytes(workload: Workload, plan: Plan) -> int:
    """Most live bytes of one worker at any point of the step.

    Activations shrink with the micro-batch. With several workers, or several micro-batches, gradients
    stay allocated for the whole step: in flat buckets, beside which backward makes each gradient anew.
    Of sparse gradients a worker holds its own rows and those of all.
    The optimizer's state shrinks with the workers where each updates its part of the parameters.

    Args:
        workload: The traced step of one worker's whole batch.
        plan: Its `workers` and `accumulate` count. Its precision does where the step was traced in it.

    Source: liveness of the trace plus the bucket layout of the reducer.
    """
    workload = workload.at(plan.precision, plan.memory_format)
    rows = {g.parameter.name: g.to_send for g in sent_by_rows(workload, plan.sync)}
    gradients = [
        rows[p.name].num_bytes * (1 + plan.workers) if p.name in rows else p.num_bytes
        for p in workload.parameters
        if p.is_trainable
    ]
    persistent = sum(gradients)
    largest = max(gradients, default=0)
    if plan.workers == 1 and plan.accumulate == 1:
        return workload.peak_memory_bytes
    parts = state_parts(plan.sync, plan.workers)
    points: Sequence[MemoryPoint] = workload.memory
    peak = max(
        (
            p.parameter_bytes
            + _ceil(p.state_bytes, parts)
            + _ceil(p.activation_bytes, plan.accumulate)
            for p in points
        ),
        default=0,
    )
    held = () if replaces_update(plan.sync) else tuple(rows)
    return peak + persistent + largest + _remembered_bytes(workload, plan, held)


def _remembered_bytes(workload: Workload, plan: Plan, sparse: Collection[str]) -> int:
    """What the compression of several workers keeps from step to step, of all but sparse gradients."""
    if plan.workers == 1:
        return 0
    trainable = [p for p in workload.parameters if p.is_trainable and p.name not in sparse]
    sizes = [(p.num_bytes, element_bytes(p.dtype)) for p in trainable]
    return sum(state_bytes(plan.sync, num_bytes // each, each) for num_bytes, each in sizes)


def memory_capacity_bytes(machine: Machine, workload: Workload, plan: Plan) -> int:
    """Bytes that one worker of the plan may use: of its GPU, or its share of the host's memory.

    Returns 0 when the profile does not tell.
    """
    if workload.device == "cuda":
        sizes = [d.memory_bytes for d in machine.devices if d.kind == "cuda"]
        return int(USABLE_SHARE * min(sizes)) if sizes else 0
    return int(USABLE_SHARE * machine.host.memory_bytes / plan.workers)


def fits(machine: Machine, workload: Workload, plan: Plan) -> bool:
    """Whether the predicted peak is within what one worker may use; True when that is unknown."""
    capacity = memory_capacity_bytes(machine, workload, plan)
    return capacity == 0 or peak_memory_bytes(workload, plan) <= capacity


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)
