"""`trace`: one training step as a `Workload`, found without running it.

The step is taken on fake tensors: forward, loss, backward and optimizer issue the operators that eager
execution would issue, in the same order, but nothing is computed and nothing large is allocated.
"""

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.optim import Optimizer

from ridgeline.errors import WorkloadError
from ridgeline.plan import Precision
from ridgeline.tracing.accumulation import lone_references
from ridgeline.tracing.arguments import dtype_name
from ridgeline.tracing.graph import Edges, data_flow_edges, join, storage_edges
from ridgeline.tracing.memory import memory_points
from ridgeline.tracing.module_path import ModulePath
from ridgeline.tracing.operands import storage_address
from ridgeline.tracing.recorder import Record, Recorder, Use
from ridgeline.tracing.refusal import check_loss, refusal
from ridgeline.tracing.stepping import record_optimizer
from ridgeline.tracing.storages import Storages
from ridgeline.tracing.twin import Twin, make_twin, tensors_of
from ridgeline.workload import Op, Parameter, Role, TensorSpec, Workload

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where tensors keep the hooks of their gradients."""

LossFn = Callable[[nn.Module, Any], Tensor]
AUTOCAST: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16}
"""Precisions in which a step has other operators; `tf32` only runs the same ones faster."""


def trace(
    model: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    batch: Any,
    *,
    name: str = "model",
    precisions: Collection[str] = (),
) -> Workload:
    """One training step as a `Workload`: every operator, its cost, its order; nothing is executed.

    The step is that of the second and all later calls: gradients start as None, the optimizer's state
    exists. Model, optimizer, batch and random state are left as they are; `model.training` decides on
    dropout and batch statistics as usual.

    Args:
        model: On one device; its first parameter's device is the workload's.
        loss_fn: `loss_fn(model, batch)` returns a scalar tensor.
        optimizer: Over parameters of `model`.
        batch: Nested tuples, lists or dicts with tensors; the leading dimension of the first one that
            has any is the number of samples. Tensors on another device count as already copied.
        name: For reports.
        precisions: Those of a plan. In each that changes the operators (`bf16`) the step is traced as well,
            as a variant.

    Raises:
        WorkloadError: the loss is no scalar or needs no gradient, the step depends on the values of
            tensors, or model, optimizer or batch are not what a step needs. What `loss_fn` raises on
            its own account passes through.

    Cost: `loss_fn` is called twice on fake tensors: host time of a few eager steps, no device work; as often
        again for each variant.
    """
    unknown = set(precisions) - set(get_args(Precision))
    if unknown:
        raise WorkloadError(
            f"wanted precisions out of {', '.join(get_args(Precision))}, got {', '.join(sorted(unknown))}; "
            "correct the name"
        )
    _check(model, batch)
    step = _Step(model, loss_fn, optimizer, batch)
    with _untouched_random_state(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        workload = _traced(step, name)
        variants = [
            _traced(step._replace(precision=precision), name)
            for precision in AUTOCAST
            if precision in precisions
        ]
    return msgspec.structs.replace(workload, variants=tuple(variants))


class _Step(NamedTuple):
    """What is traced, and in which precision."""

    model: nn.Module
    loss_fn: LossFn
    optimizer: Optimizer
    batch: Any
    precision: Precision = "as-is"


def _traced(step: _Step, name: str) -> Workload:
    model, batch = step.model, step.batch
    run = _run(step)
    records = run.recorder.records
    flow, hazards = storage_edges(records)
    traced, why = _data_flow(step, run.recorder)
    notes = [*run.notes]
    if traced is None:
        notes.append(f"dependencies come from storages, because {why}")
    else:
        flow[: len(traced)] = traced
    return Workload(
        name=name,
        device=_device(model),
        samples=_samples(batch),
        batch=tuple(_spec_of(tensor, "batch") for tensor in tensors_of(batch)),
        ops=tuple(
            _op(record, edges, run.recorder.storages, _device(model))
            for record, edges in zip(records, join(flow, hazards), strict=True)
        ),
        parameters=_parameters(model, run.ready),
        ready_order=tuple(run.ready),
        buffer_bytes=sum(b.numel() * b.element_size() for b in model.buffers()),
        memory=memory_points(run.recorder.storages.lifetimes, len(records)),
        dependency_source="storage" if traced is None else "make_fx",
        fused_optimizer_bytes=run.fused_optimizer_bytes,
        precision=step.precision,
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Run:
    """A recorded step: `ready` maps parameter names, in ready order, to the op that completed them."""

    recorder: Recorder
    ready: dict[str, int]
    fused_optimizer_bytes: int
    notes: tuple[str, ...]


def _run(step: _Step) -> _Run:
    """The whole step on a twin."""
    model, batch = step.model, step.batch
    twin = make_twin(model, step.optimizer, batch)
    recorder, ready = _recorder(twin, None)
    with twin.mode, recorder:
        loss = _forward_backward(twin, step, recorder)
        stepping = record_optimizer(twin, recorder)
    del loss
    recorder.storages.close()
    notes = [stepping.note] if stepping.note else []
    hooked = [
        parameter_name
        for parameter_name, parameter in model.named_parameters()
        if any(getattr(parameter, hooks, None) for hooks in _HOOKS)
    ]
    if hooked:
        notes.append(f"hooks on parameters are not traced: {', '.join(hooked)}")
    if recorder.uncounted:
        notes.append(
            f"operators without a FLOP formula, counted 0: {', '.join(recorder.uncounted)}"
        )
    device = next(model.parameters()).device
    if any(tensor.device != device for tensor in tensors_of(batch)):
        notes.append(f"the batch was traced as if it were on {device} already")
    return _Run(recorder, ready, stepping.fused_bytes, tuple(notes))


def _recorder(twin: Twin, in_place: AbstractSet[int] | None) -> tuple[Recorder, dict[str, int]]:
    """A recorder for a twin that knows its tensors, and the ready order that will fill up."""
    alone = lone_references(twin.mode, next(twin.model.parameters()).device)
    storages = Storages()
    for parameter in twin.model.parameters():
        storages.assign(parameter, "parameter")
    for buffer in twin.model.buffers():
        storages.assign(buffer, "buffer")
    for tensor in twin.batch_tensors():
        storages.assign(tensor, "batch")
    recorder = Recorder(ModulePath(twin.model), storages, alone=alone, in_place=in_place)
    ready: dict[str, int] = {}

    def follow(name: str, parameter: Tensor) -> None:
        def completed(tensor: Tensor) -> None:
            ready.pop(name, None)  # accumulated again: what counts is the last time
            ready[name] = len(recorder.records) - 1
            assert tensor.grad is not None
            storages.assign(tensor.grad, "gradient")

        parameter.register_post_accumulate_grad_hook(completed)

    for name, parameter in twin.parameters.items():
        if parameter.requires_grad:
            follow(name, parameter)
    return recorder, ready


def _forward_backward(twin: Twin, step: _Step, recorder: Recorder) -> Tensor:
    """Forward and backward inside the active modes; the loss.

    Raises:
        WorkloadError: see `trace`.
    """
    recorder.phase = "forward"
    recorder.scalar_of = partial(_batch_count, twin.model)
    try:
        with _autocast(step):
            loss = step.loss_fn(twin.model, twin.batch)
        check_loss(loss)
        recorder.phase = "backward"
        loss.backward()
    except RuntimeError as error:
        refused = refusal(error, recorder)
        if refused is None:
            raise
        raise refused from error
    finally:
        recorder.scalar_of = None
    return loss


def _batch_count(model: nn.Module, tensor: Tensor) -> float | None:
    """Batches that a batch norm without momentum has averaged over: it asks, and any number will do."""
    address = storage_address(tensor)
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] == "num_batches_tracked" and storage_address(buffer) == address:
            return 1000.0
    return None


def _autocast(step: _Step) -> AbstractContextManager[Any]:
    """The precision as the runtime sets it."""
    if step.precision not in AUTOCAST:
        return nullcontext()
    device = next(step.model.parameters()).device
    return torch.autocast(device.type, AUTOCAST[step.precision], cache_enabled=False)


def _data_flow(step: _Step, first: Recorder) -> tuple[Edges | None, str]:
    """Data-flow edges of forward and backward; None, and the reason, where they cannot be had."""
    twin = make_twin(step.model, step.optimizer, step.batch)
    recorder, _ = _recorder(twin, first.in_place)
    edges: list[Edges] = []

    def flow(tensors: Sequence[Tensor]) -> None:
        with recorder:
            _forward_backward(twin, step, recorder)
        mode = get_proxy_mode()
        assert mode is not None
        edges.append(data_flow_edges(mode.tracer.graph, recorder.issued))

    inputs = [*twin.model.parameters(), *twin.model.buffers(), *twin.batch_tensors()]
    try:
        with twin.mode:
            make_fx(flow)(inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, AssertionError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return None, f"make_fx cannot trace this step ({reason[0]})"
    names = [record.name for record in first.records if record.phase != "optimizer"]
    traced = [record.name for record in recorder.records]
    for index, (mine, other) in enumerate(zip(names, traced, strict=False)):
        if mine != other:
            return None, f"make_fx issues {other} where op {index} of the step is {mine}"
    if len(names) != len(traced):
        return None, f"make_fx issues {len(traced)} ops where the step has {len(names)}"
    return edges[0], ""


def _parameters(model: nn.Module, ready: Mapping[str, int]) -> tuple[Parameter, ...]:
    return tuple(
        Parameter(
            name=name,
            shape=tuple(parameter.shape),
            dtype=dtype_name(parameter.dtype),
            num_bytes=parameter.numel() * parameter.element_size(),
            is_trainable=parameter.requires_grad,
            ready_op=ready.get(name, -1),
        )
        for name, parameter in model.named_parameters()
    )


def _op(record: Record, edges: tuple[int, ...], storages: Storages, device: str) -> Op:
    def spec(use: Use) -> TensorSpec:
        return _spec(use, storages.role(use.storage), on_host=use.on_cpu and device != "cpu")

    return Op(
        name=record.name,
        phase=record.phase,
        module=record.module,
        family=record.family,
        dtype=record.dtype,
        inputs=tuple(map(spec, record.inputs)),
        outputs=tuple(map(spec, record.outputs)),
        arguments=record.arguments,
        flops=record.flops,
        bytes_read=record.bytes_read,
        bytes_written=record.bytes_written,
        dependencies=edges,
        memory=tuple((use.storage, use.offset) for use in (*record.inputs, *record.outputs)),
    )


def _spec(use: Use, role: Role, *, on_host: bool) -> TensorSpec:
    return TensorSpec(
        shape=use.shape, stride=use.stride, dtype=use.dtype, role=role, on_host=on_host
    )


def _spec_of(tensor: Tensor, role: Role) -> TensorSpec:
    return TensorSpec(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()) if tensor.layout is torch.strided else (),
        dtype=dtype_name(tensor.dtype),
        role=role,
    )


def _check(model: nn.Module, batch: Any) -> None:
    """Raise unless there is something to train and something to train on."""
    if next(model.parameters(), None) is None:
        raise WorkloadError(
            f"wanted a model with parameters, got none in {type(model).__name__}; "
            "register what is trained as nn.Parameter"
        )
    if not any(tensor.dim() for tensor in tensors_of(batch)):
        raise WorkloadError(
            "wanted a batch of nested tuples, lists or dicts with at least one tensor that has "
            f"dimensions, got {type(batch).__name__} with none; pass what a data loader yields"
        )


def _samples(batch: Any) -> int:
    return next(tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim())


def _device(model: nn.Module) -> Literal["cpu", "cuda"]:
    return "cuda" if next(model.parameters()).device.type == "cuda" else "cpu"


@contextmanager
def _untouched_random_state() -> Iterator[None]:
    """Put the random states of Python, NumPy and torch back afterwards."""
    python, array, cpu = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(array)
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
