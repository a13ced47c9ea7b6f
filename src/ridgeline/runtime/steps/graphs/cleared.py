"""What another runner of a step has found out before its capture: in a trial of the plan that is kept, say.

Looking for what cannot be captured takes two steps, the second ten times slower than they are, and comparing
what is compiled six more. Both hold for as long as the code of the step, and what that reads, are the same.

What was looked for in an earlier process holds as well where torch's compiler reads the same: all code that
the loss runs through, the operators that it comes to with their shapes, and what it writes. Comparisons are
made again in each process.
"""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.optimizers.step_hooks import replaced_methods, step_hooks
from ridgeline.programs.compiling import Form
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.graphs.clearance import Clearance
from ridgeline.runtime.steps.whole_step.reads import StepReads
from ridgeline.tensors import batch as batches
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World


class Cleared(NamedTuple):
    """A step that was captured, and found to equal the eager one.

    Attributes:
        key: Of its plan, its batch and its optimizer; see `key_of`.
        reads: What its code reads.
        clearance: What looking at it has found.
        form: What was captured.
    """

    key: tuple[Any, ...]
    reads: StepReads
    clearance: Clearance
    form: Form


def cleared_before(body: StepBody, batch: Any, world: World) -> Cleared | None:
    """What was found out of this step before, where nothing of it is another; the same on all workers.

    Cost: See `StepReads.is_still_read`.
    """
    key = key_of(body, batch)
    found = next((one for one in body.findings.cleared if one.key == key), None)
    if found is not None and not found.reads.is_still_read(batch):
        found = None
    return None if largest_of_workers(float(found is None), world) else found


def may_hold_later(body: StepBody, batch: Any, world: World) -> bool:
    """Whether what was found out may hold once the code has run: some modules make what they need then.

    Several workers do not wait for that: they send gradients as they will.
    """
    key = key_of(body, batch)
    return world.size == 1 and any(one.key == key for one in body.findings.cleared)


def keep(body: StepBody, batch: Any, reads: StepReads, clearance: Clearance) -> None:
    """Remember a step that was captured, in place of what was remembered before."""
    found = body.findings
    found.cleared[:] = [Cleared(key_of(body, batch), reads, clearance, body.form)]
    # Only what left nothing open: draws and doubts are settled in the process that has them.
    if clearance == Clearance():
        found.digests.add(_digest(body, batch, reads))


def cleared_earlier(body: StepBody, batch: Any, world: World) -> bool:
    """Whether an earlier process captured and compared this very step, without a doubt or draws on the host.

    Only where all is undone: what trains is looked at in its own process.

    Cost: Reads the step, unless no step of this kind was captured earlier; what was read serves the capture.
    """
    if not (body.is_undone and body.findings.earlier_digests) or world.size > 1:
        return False
    try:
        reads = StepReads(body, batch, world.device.type, is_lifted=False)
    except CaptureError:
        return False
    return _digest(body, batch, reads) in body.findings.earlier_digests


def _digest(body: StepBody, batch: Any, reads: StepReads) -> str:
    """Equal for steps of equal code and operators that are run alike, in this process or another."""
    plan = body.plan
    way = f"{plan.execution} {plan.kernels} {plan.random}"
    parts = [torch.__version__, repr(key_of(body, batch)), way, reads.text]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def key_of(body: StepBody, batch: Any) -> tuple[Any, ...]:
    """What is found out is true of steps with this key only."""
    plan, optimizer = body.plan, body.optimizer
    settings = [
        [(name, value) for name, value in group.items() if not isinstance(value, (Tensor, list))]
        for group in optimizer.param_groups
    ]
    return (
        (plan.precision, plan.memory_format, plan.accumulate, body.clip_norm),
        repr(batches.signature(batch)),
        (type(optimizer), repr(settings), [len(g["params"]) for g in optimizer.param_groups]),
        ([len(hooks) for hooks in step_hooks(optimizer)], replaced_methods(optimizer)),
    )
