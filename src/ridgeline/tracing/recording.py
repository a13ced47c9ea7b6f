"""One step under the recorder: forward, loss, backward and optimizer, on fake tensors or on real ones."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ridgeline.reach.loss import scalar_loss
from ridgeline.tensors.nests import tensors_in
from ridgeline.tracing.module_path import ModulePath
from ridgeline.tracing.operators.accumulation import lone_references
from ridgeline.tracing.operators.operands import storage_address
from ridgeline.tracing.recorded_step import AUTOCAST, Recording, Step, unlimited
from ridgeline.tracing.recorder import TracingMode
from ridgeline.tracing.refusal import refusal
from ridgeline.tracing.stepping import record_optimizer
from ridgeline.tracing.storages import Storages
from ridgeline.tracing.subject import Subject, trained_parameters
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


class StepRecorder(TracingMode):
    """A recorder that knows the tensors of a step, and the order in which gradients become ready.

    Args:
        subject: What is followed, by hooks, until the recorder is closed.
        check: Called before every operator; what it raises ends the recording.
    """

    def __init__(
        self,
        subject: Subject,
        check: Callable[[], None] = unlimited,
    ) -> None:
        storages = Storages()
        super().__init__(
            ModulePath(subject.model),
            storages,
            alone=lone_references(subject.mode, subject.device),
            is_fake=subject.is_fake,
            originals=subject.originals,
            check=check,
        )
        # Before the first operator: what is not known by then counts as made by the step.
        for parameter in (*trained_parameters(subject.optimizer), *subject.model.parameters()):
            storages.assign(parameter, "parameter")
        for buffer in subject.model.buffers():
            storages.assign(buffer, "buffer")
        for tensor in tensors_in(subject.batch):
            storages.assign(tensor, "batch")
        self.ready: dict[str, int] = {}
        self._handles: list[RemovableHandle] = []
        with ExitStack() as undoing:
            undoing.callback(self.close)
            for name, parameter in subject.parameters.items():
                if parameter.requires_grad:
                    hook = partial(self._completed, name)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
            undoing.pop_all()

    def _completed(self, name: str, tensor: Tensor) -> None:
        self.ready.pop(name, None)  # accumulated again: what counts is the last time
        self.ready[name] = len(self.records) - 1
        assert tensor.grad is not None
        self.storages.assign(tensor.grad, "gradient")

    def close(self) -> None:
        """Take all hooks off, and stop following storages."""
        for handle in self._handles:
            handle.remove()
        super().close()


def forward_backward(subject: Subject, step: Step, recorder: TracingMode) -> Tensor:
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
                loss = scalar_loss(step.loss_fn(subject.model, subject.batch))
            recorder.phase = "backward"
            loss.backward()
    # All three errors of fake tensors are subclasses of it.
    except RuntimeError as error:
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
    if step.precision not in AUTOCAST:
        return nullcontext()
    device = next(step.model.parameters()).device
    return torch.autocast(device.type, AUTOCAST[step.precision], cache_enabled=False)


def _batch_count(model: nn.Module, tensor: Tensor) -> float | None:
    """Batches that a batch norm without momentum has averaged over: it asks, and any number will do."""
    address = storage_address(tensor)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked" and storage_address(buffer) == address:
            return 1000.0
    return None


def record_clipping(subject: Subject, recorder: TracingMode, max_norm: float) -> None:
    """Record what scales the gradients down to a total norm, with `CLIPPING` for its module.

    Args:
        subject: The step, after its backward pass.
        recorder: Active, in the phase of the optimizer.
        max_norm: Above 0.
    """
    first = len(recorder.records)
    # Of stand-ins torch would take another form than of the tensors that they stand for.
    parameters = [*trained_parameters(subject.optimizer)]
    nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    recorder.records[first:] = [
        dataclasses.replace(record, module=CLIPPING) for record in recorder.records[first:]
    ]
