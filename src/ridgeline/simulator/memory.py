"""Predicted peak memory of a workload under a plan, and whether it fits.

Live bytes come from the trace, what operators take for themselves from their timings. What the allocator
rounds up and other programs hold is not known, so a share of the device is kept free.
"""

from collections.abc import Collection

from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.model import setting_of, workers_in_host
from ridgeline.simulator.pricing.dataflow import element_bytes
from ridgeline.simulator.pricing.sparse_rows import sent_by_rows
from ridgeline.simulator.workspaces import workspace_bytes
from ridgeline.synchronisation import replaces_update, state_bytes, state_parts
from ridgeline.workload import MemoryPoint, Workload

USABLE_SHARE = 0.9
"""Share of a device's memory that a plan may fill.

Source: assumed; allocator rounding, CUDA context and library workspaces take up to a tenth.
"""

PEAK_CATEGORIES = ("parameter", "gradient", "state", "activation", "workspace")
"""What memory is held for, as in the names of the fields below."""

_NOTHING = MemoryPoint(
    op=-1, parameter_bytes=0, gradient_bytes=0, state_bytes=0, activation_bytes=0
)


class MemoryPeak(MemoryPoint, frozen=True, kw_only=True):
    """The moment of a step at which one worker holds most, and what it holds then.

    `gradient_bytes` count buckets and what a compression remembers. `workspace_bytes` are what the operator
    that runs, and those before it, took for themselves; None where nobody measured that.
    """

    workspace_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """All of them."""
        return super().total_bytes + (self.workspace_bytes or 0)


def peak_memory_bytes(workload: Workload, plan: Plan, machine: Machine | None = None) -> int:
    """Most live bytes of one worker at any point of the step; see `memory_peak`."""
    return memory_peak(workload, plan, machine).total_bytes


def memory_peak(workload: Workload, plan: Plan, machine: Machine | None = None) -> MemoryPeak:
    """What one worker holds where it holds most.

    Activations shrink with the micro-batch. With several workers, or several micro-batches, gradients stay
    allocated for the whole step: in flat buckets, beside which backward makes each gradient anew. Of sparse
    gradients a worker holds its own rows and those of all.
    The optimizer's state shrinks with the workers where each updates its part of the parameters.

    Args:
        workload: The traced step of one worker's whole batch.
        plan: Its `workers` and `accumulate` count. Its precision does where the step was traced in it.
        machine: Whose measured workspaces count; None counts none.

    Source: liveness of the trace plus the bucket layout of the reducer; allocations within operators as
        measured (`probe/operators/workspaces.py`).
    """
    written, workload = workload, workload.at(plan.precision, plan.memory_format)
    spaces: tuple[int, ...] = ()
    if machine is not None:
        setting = setting_of(machine, workload, plan)
        spaces = workspace_bytes(
            machine, workload, setting, accumulate=plan.accumulate, written=written
        )
    is_alone = plan.workers == 1 and plan.accumulate == 1
    parts = state_parts(plan.sync, plan.workers)

    def space(point: MemoryPoint) -> int:
        return spaces[point.op] if 0 <= point.op < len(spaces) else 0

    def total(point: MemoryPoint) -> int:
        traced = point.parameter_bytes + _ceil(point.state_bytes, parts)
        traced += _ceil(point.activation_bytes, plan.accumulate)
        return traced + space(point) + (point.gradient_bytes if is_alone else 0)

    # Searched with the plan's own numbers: where activations shrink, the peak may be elsewhere.
    most = max(workload.memory, key=total, default=_NOTHING)
    return MemoryPeak(
        op=most.op,
        parameter_bytes=most.parameter_bytes,
        gradient_bytes=most.gradient_bytes if is_alone else _gradient_bytes(workload, plan),
        state_bytes=_ceil(most.state_bytes, parts),
        activation_bytes=_ceil(most.activation_bytes, plan.accumulate),
        workspace_bytes=space(most) if spaces else None,
    )


def _gradient_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of gradients that stay for the whole step, the largest beside them, and what is left out."""
    rows = {g.parameter.name: g.to_send for g in sent_by_rows(workload, plan.sync)}
    gradients = [
        rows[p.name].num_bytes * (1 + plan.workers) if p.name in rows else p.num_bytes
        for p in workload.parameters
        # Those without gradients in this step have room in a bucket as well.
        if p.is_trainable
    ]
    held = () if replaces_update(plan.sync) else tuple(rows)
    kept = sum(gradients) + max(gradients, default=0)
    return kept + _remembered_bytes(workload, plan, held)


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
        # The smallest GPU, since every worker runs the same plan.
        return int(USABLE_SHARE * min(sizes)) if sizes else 0
    return int(USABLE_SHARE * machine.host.memory_bytes / workers_in_host(machine, plan.workers))


def fits(machine: Machine, workload: Workload, plan: Plan) -> bool:
    """Whether the predicted peak is within what one worker may use; True when that is unknown."""
    capacity = memory_capacity_bytes(machine, workload, plan)
    return capacity == 0 or peak_memory_bytes(workload, plan, machine) <= capacity


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)
