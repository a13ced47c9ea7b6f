"""A small network's step and what a compiler could have made of it: two products and a loop each way."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.compiled_program import CompilerKernel, CompilerProgram, Shape
from ridgeline.workload import MemoryPoint, Op, Parameter, TensorSpec, Workload

LOOP_BYTES = 12 << 20
WEIGHT = (32, 16)


def make_op(
    name: str,
    phase: str,
    shapes: Sequence[Shape],
    *,
    family: str = "matmul",
    dtype: str = "float32",
    flops: int = 0,
    num_bytes: int = 0,
    arguments: str = "[]",
) -> Op:
    """An operator over tensors of such shapes."""
    specs = tuple(TensorSpec(shape=shape, stride=(), dtype=dtype) for shape in shapes)
    return Op(
        name=f"aten.{name}.default",
        phase=phase,
        module="",
        family=family,
        dtype=dtype,
        inputs=specs,
        outputs=(),
        arguments=arguments,
        flops=flops,
        bytes_read=num_bytes,
        bytes_written=0,
    )


def make_step(ops: Sequence[Op], *, device: str = "cuda") -> Workload:
    """A step of such operators, with one parameter of `WEIGHT`."""
    return Workload(
        name="small",
        device=device,
        samples=64,
        batch=(TensorSpec(shape=(64, 16), stride=(16, 1), dtype="float32", role="batch"),),
        ops=tuple(ops),
        parameters=(
            Parameter(
                name="weight",
                shape=WEIGHT,
                dtype="float32",
                num_bytes=4 * 32 * 16,
                is_trainable=True,
                ready_op=len(ops) - 1,
            ),
        ),
        ready_order=("weight",),
        buffer_bytes=0,
        memory=(
            MemoryPoint(
                op=0, parameter_bytes=0, gradient_bytes=0, state_bytes=0, activation_bytes=0
            ),
        ),
    )


def small_step(device: str = "cuda") -> Workload:
    """A linear layer with a bias and three elementwise operators, and its backward."""
    return make_step(
        [
            make_op("addmm", "forward", [(32,), (64, 16), (16, 32)], flops=1 << 20),
            make_op("relu", "forward", [(64, 32)], family="elementwise", num_bytes=8 << 20),
            make_op("mul", "forward", [(64, 32)], family="elementwise", num_bytes=8 << 20),
            make_op("mul", "backward", [(64, 32)], family="elementwise", num_bytes=8 << 20),
            make_op("mm", "backward", [(32, 64), (64, 16)], flops=1 << 20),
        ],
        device=device,
    )


def library(name: str, *shapes: Shape, dtype: str = "float32", parts: int = 1) -> CompilerKernel:
    """The call of a library's operator."""
    return CompilerKernel(
        name=name,
        is_library=True,
        operators=(f"aten.{name}",),
        bytes_read=1 << 10,
        bytes_written=1 << 10,
        shapes=shapes,
        dtype=dtype,
        parts=parts,
    )


def loop(num_bytes: int = LOOP_BYTES, name: str = "triton_poi_fused_mul_relu_0") -> CompilerKernel:
    """A kernel of the compiler's own."""
    return CompilerKernel(
        name=name,
        is_library=False,
        operators=("aten.relu", "aten.mul"),
        bytes_read=num_bytes // 2,
        bytes_written=num_bytes - num_bytes // 2,
    )


def program(
    phase: str, *calls: CompilerKernel, inputs: Sequence[Shape] = (WEIGHT,)
) -> CompilerProgram:
    """A program of such calls."""
    kernels = tuple(dict.fromkeys(calls))
    return CompilerProgram(
        phase=phase,
        kernels=kernels,
        order=tuple(kernels.index(call) for call in calls),
        inputs=tuple(inputs),
    )


def small_programs() -> tuple[CompilerProgram, ...]:
    """The bias is in the next loop, and the weight's gradient is computed the other way round."""
    return (
        program("forward", library("mm", (64, 16), (16, 32)), loop(), inputs=[(64, 16), WEIGHT]),
        program("backward", loop(LOOP_BYTES // 2), library("mm", (16, 64), (64, 32))),
    )


def chain(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Elementwise operators that feed each other: two tensors in, two of the same size out."""
    z = torch.sin(x * y + 1.0)
    return z, torch.relu(z - y)
