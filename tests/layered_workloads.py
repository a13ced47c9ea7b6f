"""Workloads of layers in a chain, whose operators say where their tensors lie: for what reads layers."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from ridgeline.workload import Op, Parameter, TensorSpec, Workload
from strategies import make_workload


class LayerSpec(NamedTuple):
    """A layer: elements of its weights, and of what it makes of one sample; it takes what was made before."""

    name: str
    family: str
    weights: int
    outputs: int
    flops: int
    """Of one sample, forward; backward is twice that."""
    dtype: str = "float32"


CONVOLUTION = LayerSpec("conv", "convolution", 1_000, 10_000, 20_000_000)
LINEAR = LayerSpec("fc", "matmul", 1_000_000, 100, 2_000_000)
NORM = LayerSpec("norm", "normalization", 200, 10_000, 0)


_UNGROUPED = '{"args":[{"tensor":0},{"tensor":1},null,[1,1],[0,0],[1,1],false,[0,0],1],"kwargs":{}}'
"""Arguments of a convolution."""


def spec(*shape: int, role: str = "activation", dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape=shape, stride=(1,) * len(shape), dtype=dtype, role=role)


def op(phase: str, module: str, layer: LayerSpec, flops: int, inputs, outputs, memory) -> Op:
    return Op(
        name=f"aten.{layer.family}.default", phase=phase, module=module, family=layer.family,
        dtype=layer.dtype, inputs=inputs, outputs=outputs, arguments=_UNGROUPED, flops=flops, bytes_read=1,
        bytes_written=1, memory=memory,
    )  # fmt: skip


def layered(
    layers: Sequence[LayerSpec] = (CONVOLUTION, NORM, LINEAR),
    samples: int = 4,
    inputs: int = 500,
    other_flops: int = 0,
    name: str = "layers",
) -> Workload:
    """A step through the layers; storages 0, 1, ... are activations, 100, 101, ... weights."""
    forward: list[Op] = []
    backward: list[Op] = []
    optimizer: list[Op] = []
    taken = spec(samples, inputs, role="batch")
    for number, layer in enumerate(layers):
        # A norm's weights are a vector.
        shape = (layer.weights,) if layer.family == "normalization" else (layer.weights // 10, 10)
        weights = spec(*shape, role="parameter", dtype=layer.dtype)
        made = spec(samples, layer.outputs, dtype=layer.dtype)
        places = ((number, 0), (100 + number, 0), (number + 1, 0))
        work = samples * layer.flops
        forward.append(op("forward", layer.name, layer, work, (taken, weights), (made,), places))
        backward.append(
            op("backward", layer.name, layer, 2 * work, (made,), (), ((50 + number, 0),))
        )
        optimizer.append(op("optimizer", "", layer, 0, (weights,), (), ((100 + number, 0),)))
        taken = made
    loss = LayerSpec("", "reduction", 0, 1, 0)
    end = op("forward", "", loss, other_flops, (taken,), (spec(),), ((len(layers), 0), (99, 0)))
    parameters = tuple(
        Parameter(
            name=f"{layer.name}.weight", shape=(layer.weights,), dtype=layer.dtype,
            num_bytes=(2 if layer.dtype == "bfloat16" else 4) * layer.weights, is_trainable=True, ready_op=number,
        )
        for number, layer in enumerate(layers)
    )  # fmt: skip
    return structs.replace(
        make_workload(samples=samples, name=name),
        ops=(*forward, end, *reversed(backward), *optimizer),
        parameters=parameters,
        ready_order=tuple(parameter.name for parameter in reversed(parameters)),
    )
