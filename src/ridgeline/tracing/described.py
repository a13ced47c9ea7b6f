"""A recorded step as a `Workload`."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ridgeline.errors import WorkloadError
from ridgeline.optimizer_forms import fits_graph
from ridgeline.tensors.nests import tensors_in
from ridgeline.tensors.operator_text import dtype_name
from ridgeline.tracing.dependencies import dependencies
from ridgeline.tracing.memory import memory_points
from ridgeline.tracing.recorded_step import Recording, Step
from ridgeline.tracing.recorder import Record, Use
from ridgeline.tracing.storages import Storages
from ridgeline.workload import MemoryPoint, Op, Parameter, Role, TensorSpec, Workload


def recorded_workload(
    step: Step, name: str, run: Recording, notes: tuple[str, ...] = ()
) -> Workload:
    """The workload of a recording of a step; `notes` are what is to be said first."""
    records, storages = run.recorder.records, run.recorder.storages
    ops = tuple(
        _op(record, before, storages, _device(step.model))
        for record, before in zip(records, dependencies(records), strict=True)
    )
    return make_workload(
        step,
        name,
        ops,
        run.ready,
        memory=memory_points(storages.lifetimes, len(records)),
        fused_optimizer_bytes=run.fused_optimizer_bytes,
        notes=(*run.notes, *notes),
    )


def make_workload(
    step: Step,
    name: str,
    ops: tuple[Op, ...],
    ready: Mapping[str, int],
    *,
    memory: tuple[MemoryPoint, ...],
    fused_optimizer_bytes: int,
    notes: tuple[str, ...],
) -> Workload:
    """A workload of these ops; `ready` maps parameters, in ready order, to the op that completes them."""
    return Workload(
        name=name,
        device=_device(step.model),
        samples=_samples(step.batch),
        batch=tuple(spec_of(tensor, "batch") for tensor in tensors_in(step.batch)),
        ops=ops,
        parameters=_parameters(step.model, ready),
        ready_order=tuple(ready),
        buffer_bytes=sum(b.numel() * b.element_size() for b in step.model.buffers()),
        memory=memory,
        fused_optimizer_bytes=fused_optimizer_bytes,
        is_optimizer_outside=not fits_graph(step.optimizer, step.model),
        precision=step.precision,
        memory_format=step.memory_format,
        notes=notes,
    )


def spec_of(tensor: Tensor, role: Role) -> TensorSpec:
    """The description of a tensor; of a nested one, of what it holds."""
    if tensor.is_nested:
        tensor = tensor.values()
    return TensorSpec(
        shape=tuple(tensor.shape),
        # Sparse tensors raise when they are asked for strides.
        stride=tuple(tensor.stride()) if tensor.layout is torch.strided else (),
        dtype=dtype_name(tensor.dtype),
        role=role,
    )


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
    if not all(type(size) is int for size in use.shape):
        raise WorkloadError(
            f"wanted tensors whose every size is a number, got {tuple(use.shape)}, as nested ones have; no "
            "operator of theirs can be timed alone"
        )
    return TensorSpec(
        shape=use.shape, stride=use.stride, dtype=use.dtype, role=role, on_host=on_host
    )


def _samples(batch: Any) -> int:
    """The leading dimension of the first tensor that has any; 1 where no tensor shows."""
    return next((tensor.size(0) for tensor in tensors_in(batch) if tensor.dim()), 1)


def _device(model: nn.Module) -> Literal["cpu", "cuda"]:
    return "cuda" if next(iter(model.parameters())).device.type == "cuda" else "cpu"
