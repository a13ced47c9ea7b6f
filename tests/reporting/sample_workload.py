"""The sample workload: one step of a small ResNet-18 on one of two workers."""

import math

from ridgeline.workload import MemoryPoint, Op, Parameter, TensorSpec, Workload


def layers() -> list[tuple[str, int, int, int, int]]:
    """(module, channels in, channels out, kernel, output side) of the convolutions."""
    found = [("net.0", 1, 64, 7, 14)]
    channels, side = 64, 7
    for stage, width in enumerate((64, 128, 256, 512)):
        side = side if stage == 0 else (side + 1) // 2
        for block in range(2):
            entry = channels if block == 0 else width
            found.append((f"net.{stage + 1}.{block}.conv1", entry, width, 3, side))
            found.append((f"net.{stage + 1}.{block}.conv2", width, width, 3, side))
            if block == 0 and stage:
                found.append((f"net.{stage + 1}.{block}.conv3", entry, width, 1, side))
        channels = width
    return found


def spec(*shape: int) -> TensorSpec:
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return TensorSpec(shape=shape, stride=strides, dtype="float32")


def make_op(phase: str, name: str, module: str, family: str, flops: int, ins, outs) -> Op:
    return Op(
        name=f"aten.{name}.default",
        phase=phase,
        module=module,
        family=family,
        dtype="float32",
        inputs=tuple(ins),
        outputs=tuple(outs),
        arguments="[]",
        flops=flops,
        bytes_read=4 * sum(math.prod(i.shape) for i in ins),
        bytes_written=4 * sum(math.prod(o.shape) for o in outs),
    )


def forward_ops(samples: int) -> tuple[list[Op], list[tuple[str, tuple[int, ...]]]]:
    """The operators of forward, and (name, shape) of the parameters."""
    ops: list[Op] = []
    shapes: list[tuple[str, tuple[int, ...]]] = []
    for module, inner, outer, kernel, side in layers():
        image, weight = spec(samples, inner, side, side), spec(outer, inner, kernel, kernel)
        out = spec(samples, outer, side, side)
        flops = 2 * samples * outer * side * side * inner * kernel * kernel
        norm = module.replace("conv", "bn")
        ops += [
            make_op(
                "forward", "convolution", module, "convolution", flops, (image, weight), (out,)
            ),
            make_op("forward", "native_batch_norm", norm, "normalization", 0, (out,), (out,)),
            make_op("forward", "relu", norm, "elementwise", 0, (out,), (out,)),
        ]
        shapes += [(f"{module}.weight", weight.shape), (f"{norm}.weight", (outer,))]
    ins, out = (spec(samples, 512), spec(10, 512)), spec(samples, 10)
    ops.append(make_op("forward", "addmm", "fc", "matmul", 2 * samples * 5120, ins, (out,)))
    return ops, [*shapes, ("fc.weight", (10, 512))]


def backward_op(op: Op) -> Op:
    """What follows from an operator of forward: twice its FLOP, for inputs and weights."""
    name = f"{op.name.split('.')[1]}_backward"
    ins = (*op.inputs, *op.outputs)
    return make_op("backward", name, op.module, op.family, 2 * op.flops, ins, op.inputs)


def make_workload(samples: int = 128) -> Workload:
    ops, shapes = forward_ops(samples)
    ready: dict[str, int] = {}
    for op in reversed(tuple(ops)):
        ready[f"{op.module}.weight"] = len(ops)
        ops.append(backward_op(op))
    parameters = tuple(
        Parameter(
            name=name,
            shape=shape,
            dtype="float32",
            num_bytes=4 * math.prod(shape),
            is_trainable=True,
            ready_op=ready[name],
        )
        for name, shape in shapes
    )
    weights = [spec(*shape) for _, shape in shapes]
    ops.append(make_op("optimizer", "_foreach_add_", "", "elementwise", 0, weights * 2, weights))
    return Workload(
        name="resnet18",
        device="cpu",
        samples=samples,
        batch=(spec(samples, 1, 28, 28),),
        ops=tuple(ops),
        parameters=parameters,
        ready_order=tuple(p.name for p in sorted(parameters, key=lambda p: p.ready_op)),
        buffer_bytes=38_400,
        memory=make_memory(ops, sum(p.num_bytes for p in parameters)),
    )


def make_memory(ops: list[Op], parameter_bytes: int) -> tuple[MemoryPoint, ...]:
    points, activation, gradient = [], 0, 0
    num_backward = sum(op.phase == "backward" for op in ops)
    for index, op in enumerate(ops):
        if op.phase == "forward":
            activation += op.bytes_written
        elif op.phase == "backward":
            activation = max(0, activation - op.bytes_written)
            gradient += parameter_bytes // num_backward
        points.append(
            MemoryPoint(
                op=index,
                parameter_bytes=parameter_bytes,
                gradient_bytes=gradient,
                state_bytes=parameter_bytes,
                activation_bytes=activation,
            )
        )
    return tuple(points)
