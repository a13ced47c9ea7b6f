"""Layers one behind the other that read one parameter each: steps whose buckets can be held."""

from collections.abc import Sequence

import msgspec

from ridgeline.plan import Plan, Sync
from ridgeline.workload import Parameter, TensorSpec, Workload
from strategies import make_op, make_workload

MS = 1_000_000
MB = 1_000_000


def chain(
    sizes: Sequence[int],
    forward: Sequence[int],
    backward: Sequence[int],
    update: int = 4 * MS,
    device: str = "cpu",
) -> Workload:
    """A chain of layers, of which the last has its gradient first.

    Args:
        sizes: Bytes of each parameter, from the first layer on.
        forward: FLOP of each layer, a nanosecond each on the machines of `strategies`.
        backward: Likewise, in the order of backward, and what comes behind the last gradient.
        update: Bytes that the optimizer moves.
        device: `cpu` or `cuda`.
    """
    count = len(sizes)
    ops = []
    for layer, flops in enumerate(forward):
        shape = (sizes[layer] // 4,)
        read = TensorSpec(shape=shape, stride=(1,), dtype="float32", role="parameter")
        op = make_op("forward", flops=flops, number=layer)
        ops.append(msgspec.structs.replace(op, inputs=(*op.inputs, read), module=f"layers.{layer}"))
    ops += [make_op("backward", flops=flops, number=100 + n) for n, flops in enumerate(backward)]
    ops.append(make_op("optimizer", num_bytes=update, number=200, family="elementwise"))
    parameters = [
        Parameter(
            name=f"layers.{layer}.weight",
            shape=(size // 4,),
            dtype="float32",
            num_bytes=size,
            is_trainable=True,
            ready_op=2 * count - 1 - layer,
        )
        for layer, size in enumerate(sizes)
    ]
    return msgspec.structs.replace(
        make_workload(device=device),
        ops=tuple(ops),
        parameters=tuple(parameters),
        ready_order=tuple(p.name for p in reversed(parameters)),
        memory=(),
    )


def holding(held: int, accumulate: int = 1) -> Plan:
    """Two workers; a bucket a gradient, so many of them held."""
    sync = Sync(bucket_bytes=(1,), options={"held": held} if held else {})
    return Plan(workers=2, threads=1, sync=sync, accumulate=accumulate)
