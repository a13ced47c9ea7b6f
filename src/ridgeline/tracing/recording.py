"""One step under the recorder: forward, loss, backward and optimizer, on fake tensors or on real ones."""

import dataclasses
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ridgeline.capture.casts import autocast_of
from ridgeline.optimizer_forms import differentiates_gradients
from ridgeline.optimizers.groups import parameters_of
from ridgeline.reach.loss import have_gradients, scalar_loss, start_backward
from ridgeline.tensors.nests import tensors_in
from ridgeline.tracing.operators.operands import storage_address
from ridgeline.tracing.recorded_step import Recording, Step
from ridgeline.tracing.recorder import StepRecorder
from ridgeline.tracing.refusal import refusal
from ridgeline.tracing.stepping import record_optimizer
from ridgeline.tracing.subject import Subject
from ridgeline.workload import CLIPPING

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where tensors keep the hooks of their gradients."""


def record_step(subject: Subject, step: Step) -> Recording:
    """The whole step, recorded.

    Raises:
        WorkloadError: see `trace`.
    """
    with closing(StepRecorder(subject, check=step.check)) as recorder:
        with subject.mode, recorder:
            loss = forward_backward(subject, step, recorder)
            recorder.phase = "optimizer"
            if step.clip_norm is not None:
                record_clipping(subject, recorder, step.clip_norm)
            stepping = record_optimizer(subject, recorder, step.optimizer)
        # Its graph holds tensors, which would count as outliving the step.
        del loss
    notes = [stepping.note] if stepping.note else []
    hooked = [
        name
        for name, parameter in step.model.named_parameters()
        if any(getattr(parameter, hooks, None) for hooks in _HOOKS)
    ]
    if hooked and subject.is_fake:
        notes.append(f"hooks on parameters are not traced: {', '.join(hooked)}")
    if recorder.uncounted:
        notes.append(
            f"operators without a FLOP formula, counted 0: {', '.join(recorder.uncounted)}"
        )
    if recorder.collectives:
        notes.append(
            f"what is sent between workers depends on the plan, and was left out: "
            f"{', '.join(recorder.collectives)}"
        )
    if any(tensor.device != subject.device for tensor in tensors_in(step.batch)):
        notes.append(f"the batch was traced as if it were on {subject.device} already")
    return Recording(
        recorder, recorder.ready, stepping.fused_bytes, bool(stepping.note), tuple(notes)
    )


def forward_backward(subject: Subject, step: Step, recorder: StepRecorder) -> Tensor:
    """Forward and backward inside the active modes; the loss.

    Raises:
        WorkloadError: see `trace`.
    """
    recorder.phase = "forward"
    if subject.is_fake:
        recorder.scalar_of = partial(_batch_count, subject.model)
    try:
        with alone(subject.model):
            with autocast(step):
                loss = step.loss_fn(subject.model, subject.batch)
                has_own = have_gradients(subject.model.parameters())
                loss = scalar_loss(loss, has_gradients=has_own)
            recorder.phase = "backward"
            keeps_graph = differentiates_gradients(step.optimizer)
            start_backward(loss, has_gradients=has_own, keeps_graph=keeps_graph)
    # All three errors of fake tensors are of the first kind; Python and NumPy raise the second.
    except (RuntimeError, TypeError) as error:
        refused = refusal(error, recorder)
        if refused is None:
            raise
        raise refused from error
    finally:
        recorder.scalar_of = None
    return loss


def alone(model: nn.Module) -> AbstractContextManager[Any]:
    """Keeps a model that sends its gradients from doing so: what is sent is the plan's affair."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def autocast(step: Step) -> AbstractContextManager[Any]:
    """The precision as the runtime sets it."""
    return autocast_of(step.precision, next(iter(step.model.parameters())).device.type)


def _batch_count(model: nn.Module, tensor: Tensor) -> float | None:
    """Batches that a batch norm without momentum has averaged over: it asks, and any number will do."""
    address = storage_address(tensor)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked" and storage_address(buffer) == address:
            return 1000.0
    return None


def record_clipping(subject: Subject, recorder: StepRecorder, max_norm: float) -> None:
    """Record what scales gradients down to a total norm above 0, with `CLIPPING` for its module."""
    first = len(recorder.records)
    # Of stand-ins torch would take another form than of the tensors that they stand for.
    parameters = parameters_of(subject.optimizer)
    nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    recorder.records[first:] = [
        dataclasses.replace(record, module=CLIPPING) for record in recorder.records[first:]
    ]
