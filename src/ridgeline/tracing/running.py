"""A step recorded as it really runs, where fake tensors cannot go; what it did is taken back."""

import statistics
import time

import msgspec
import torch
from torch import Tensor, nn

from ridgeline.errors import OutOfTimeError, SideEffectError
from ridgeline.optimizer_forms import differentiates_gradients
from ridgeline.optimizers.groups import parameters_of, plain_state
from ridgeline.reach.loss import EarlierGraphs, have_gradients, scalar_loss, start_backward
from ridgeline.reach.undo import undone
from ridgeline.tracing.described import recorded_workload
from ridgeline.tracing.opaque import PHASES, opaque_workload
from ridgeline.tracing.recorded_step import Step
from ridgeline.tracing.recording import alone, autocast, record_step
from ridgeline.tracing.refusal import obstacle
from ridgeline.tracing.subject import Subject, itself
from ridgeline.workload import Phase, Workload

TIMED_STEPS = 3
"""Steps whose phases are timed where nothing else is known of them; the median counts."""


def real_workload(step: Step, name: str, why: str) -> Workload:
    """The workload of a step that really ran: once as it is, then under the recorder.

    `why` it could not be traced without running is for the notes.

    Raises:
        WorkloadError: the loss is no scalar or needs no gradient.
        SideEffectError: the loss goes back through what was computed before the step.
        OutOfTimeError: of the step's `check`, which is also called before each step that is not recorded.
        Exception: whatever the user's code raises.

    Cost: Two steps, five where the recorder cannot see into them; a copy of what they may change.
    """
    subject = itself(step.model, step.optimizer, step.batch)
    workload, reason = None, ""
    note = f"recorded from a real step, which was taken back: {why}"
    with (
        undone(step.model, step.loss_fn, step.optimizer, step.batch, subject.batch) as undo,
        plain_state(step.optimizer),
    ):
        earlier = EarlierGraphs(step.model, step.loss_fn, step.optimizer, subject.batch)
        # Makes what is made once, and shows the user's own errors.
        _plain_step(subject, step, earlier)
        step.optimizer.zero_grad(set_to_none=True)
        try:
            run = record_step(subject, step)
            workload = recorded_workload(step, name, run, (note,))
        except (OutOfTimeError, SideEffectError):
            raise
        except Exception as error:  # noqa: BLE001 - the plain step was fine: the user's code is not at fault
            reason = obstacle(error)
        if workload is None:
            workload = _opaque(subject, step, name, f"{why}; and of a real step: {reason}")
    return msgspec.structs.replace(workload, notes=(*workload.notes, *undo.notes))


def _opaque(subject: Subject, step: Step, name: str, why: str) -> Workload:
    ready: dict[str, None] = {}

    def follow(parameter_name: str) -> object:
        def completed(_: Tensor) -> None:
            # A parameter that is used twice is complete with its last accumulation.
            ready.pop(parameter_name, None)
            ready[parameter_name] = None

        return completed

    # Timed without hooks; the order of gradients is taken from one step more.
    taken = [_plain_step(subject, step) for _ in range(TIMED_STEPS)]
    handles = [
        parameter.register_post_accumulate_grad_hook(follow(parameter_name))
        for parameter_name, parameter in subject.parameters.items()
        if parameter.requires_grad
    ]
    try:
        _plain_step(subject, step)
    finally:
        for handle in handles:
            handle.remove()
    seconds: dict[Phase, float] = {
        phase: statistics.median(one[phase] for one in taken) for phase in PHASES
    }
    return opaque_workload(step, name, seconds, tuple(ready), why)


def _plain_step(
    subject: Subject, step: Step, earlier: EarlierGraphs | None = None
) -> dict[Phase, float]:
    """One step as it is; seconds of its phases."""
    step.check()
    step.optimizer.zero_grad(set_to_none=True)
    marks = [_now(subject.device)]
    with alone(subject.model):
        with autocast(step):
            loss = step.loss_fn(subject.model, subject.batch)
            has_own = have_gradients(parameters_of(step.optimizer))
            loss = scalar_loss(loss, has_gradients=has_own)
        if earlier is not None:
            earlier.refuse_in(loss)
        marks.append(_now(subject.device))
        keeps_graph = differentiates_gradients(step.optimizer)
        start_backward(loss, has_gradients=has_own, keeps_graph=keeps_graph)
    marks.append(_now(subject.device))
    if step.clip_norm is not None:
        # As a part of the optimizer's phase, which it is in a recorded step, too.
        held = parameters_of(step.optimizer)
        # Torch's call takes no sparse gradients; of these the rows are few, and their scaling is not counted.
        dense = [p for p in held if p.grad is None or not p.grad.is_sparse]
        nn.utils.clip_grad_norm_(dense, step.clip_norm)
    type(step.optimizer).step(step.optimizer)  # not what a scheduler has wrapped around it
    marks.append(_now(subject.device))
    return {phase: end - begin for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False)}


def _now(device: torch.device) -> float:
    """Seconds of a clock, when the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
