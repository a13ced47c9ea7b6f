"""`Workload`: what one training step must do, operator by operator, before anything has run.

The step described is that of *one worker* with the batch that this worker gets.
"""

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec

from ridgeline import units
from ridgeline.codec import Noun, Value
from ridgeline.plan import MemoryFormat, Precision

Phase = Literal["forward", "backward", "optimizer"]
CLIPPING = "clip_norm"
"""In the place of a module of operators that clip gradients, in the phase of the optimizer."""
Family = Literal[
    "matmul",
    "convolution",
    "attention",
    "elementwise",
    "normalization",
    "reduction",
    "gather",
    "copy",
    "view",
    "other",
]
Role = Literal["parameter", "buffer", "batch", "activation", "gradient", "state"]


_READ_VALUES = (
    "_local_scalar_dense",
    "item",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "repeat_interleave",
    "_coalesce",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "_ctc_loss",
    "_ctc_loss_backward",
    "_use_cudnn_ctc_loss",
)
"""Operators that read what the device computed. Source: ATen/native, releases 2.11 to 2.13 (LossCTC copies
lengths to the host)."""
_DRAWS = (
    "dropout",
    "bernoulli",
    "rand",
    "normal_",
    "uniform",
    "multinomial",
    "exponential",
    "rrelu",
    *("normal.", "random", "geometric", "cauchy", "poisson"),
)
"""Parts of the names of operators that draw random numbers; attention counts as what it is called with."""


class TensorSpec(Value, frozen=True, kw_only=True):
    """A tensor without its data. `dtype` as torch prints it without the prefix, e.g. `float32`.

    `on_host` marks, in a step on a GPU, a tensor in the host's memory: an optimizer's step counter.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    role: Role = "activation"
    on_host: bool = False


class Op(Value, frozen=True, kw_only=True):
    """One operator of the step, in eager execution order.

    `flops` counts a multiply-add as 2. `bytes_read` and `bytes_written` are the least traffic: each
    distinct input read once, each output written once, nothing for views. `arguments` is the JSON
    text of the operator's arguments with tensors replaced by `{"tensor": i}` (index into `inputs`),
    enough to issue the operator again on fresh tensors. `dependencies` are indices of earlier ops.
    `memory` says for each input and then each output where its data are: number of the storage, and offset
    in elements. Equal numbers are one storage throughout the step; empty where that is not known.
    """

    name: str
    phase: Phase
    module: str
    family: Family
    dtype: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    arguments: str
    flops: int
    bytes_read: int
    bytes_written: int
    dependencies: tuple[int, ...] = ()
    memory: tuple[tuple[int, int], ...] = ()

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """FLOP per byte moved; 0 for operators that move nothing."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def runs_on_host(self) -> bool:
        """Whether, in a step on a GPU, the host computes this op by itself: no kernel, no waiting."""
        tensors = (*self.inputs, *self.outputs)
        return bool(tensors) and all(spec.on_host for spec in tensors)

    @property
    def waits_for_device(self) -> bool:
        """Whether, in a step on a GPU, the host continues only when the device has done this op.

        It reads values (`.item()`, a shape that depends on them), or has the device's data on the host.
        """
        if self.runs_on_host:
            return False
        # The second last part: `aten.index.Tensor` has its namespace before and its overload behind.
        name = self.name.split(".")[-2]
        # An index of booleans has as many results as it has Trues, which only the device knows.
        if name.startswith("index"):
            return any(spec.dtype in ("bool", "uint8") for spec in self.inputs[1:])
        has_left = any(spec.on_host for spec in self.outputs)
        return name in _READ_VALUES or (has_left and not all(s.on_host for s in self.inputs))

    @property
    def draws_random(self) -> bool:
        """Whether this op draws random numbers, as dropout does and its backward pass does not."""
        # A backward pass uses the mask that forward drew.
        return "backward" not in self.name and any(word in self.name for word in _DRAWS)

    @property
    def key(self) -> str:
        """Equal for ops that must take equal time: same operator, shapes, strides, dtypes, arguments."""
        # Shapes, strides and arguments alone: the same operator of two layers is timed once.
        content = msgspec.json.encode((self.name, self.inputs, self.arguments))
        return f"{self.name}:{hashlib.sha256(content).hexdigest()[:16]}"


class Parameter(Value, frozen=True, kw_only=True):
    """A model parameter. Tied weights appear once, under their first name.

    `ready_op` is the index of the op after which its gradient is complete; -1 when it gets none
    (frozen or unused).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int
    is_trainable: bool
    ready_op: int = -1


class MemoryPoint(Value, frozen=True, kw_only=True):
    """Live bytes right after op `op`, by category; what the allocator adds is not included."""

    op: int
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int

    @property
    def total_bytes(self) -> int:
        """All live bytes."""
        return self.parameter_bytes + self.gradient_bytes + self.state_bytes + self.activation_bytes


def _drawn(ops: Sequence[Op]) -> list[tuple[str, list[list[tuple[int, int]]]]]:
    """Each operator that draws, with sizes and strides of what it fills."""

    def dims(spec: TensorSpec) -> list[tuple[int, int]]:
        # The stride of a dimension of one element is arbitrary, and differs between equal layouts.
        pairs = zip(spec.shape, spec.stride, strict=True)
        return [(size, stride) for size, stride in pairs if size > 1]

    return [(op.name, [dims(spec) for spec in op.outputs]) for op in ops if op.draws_random]


class Workload(Noun, frozen=True, kw_only=True):
    """What one training step must do; made by `rl.trace()`, saved as `workload.json`.

    `ready_order` names the parameters that receive gradients in the order in which backward
    completes them.

    `variants` are traces of the same step in other precisions and memory formats; see `at`.
    """

    kind: ClassVar[str] = "workload"
    version: ClassVar[int] = 2

    name: str
    device: Literal["cpu", "cuda"]
    samples: int
    """Leading dimension of the traced batch: samples per worker and step."""
    batch: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...]
    ready_order: tuple[str, ...]
    buffer_bytes: int
    memory: tuple[MemoryPoint, ...]
    fused_optimizer_bytes: int = 0
    """Bytes that the optimizer moves as one kernel, as in a captured step; 0 where it has no such form."""
    is_optimizer_outside: bool = False
    """Whether the optimizer steps outside of a captured step, since it has no form that a graph can hold."""
    precision: Precision = "as-is"
    memory_format: MemoryFormat = "as-is"
    variants: tuple["Workload", ...] = ()
    notes: tuple[str, ...] = ()

    def at(self, precision: Precision, memory_format: MemoryFormat = "as-is") -> "Workload":
        """The step as it was traced so; where it was not, in that precision only, or else this one."""
        loads = (self, *self.variants)
        alike = [load for load in loads if load.precision == precision]
        same = [load for load in alike if load.memory_format == memory_format]
        return (same or alike or [self])[0]

    @property
    def has_images(self) -> bool:
        """Whether convolutions over two dimensions take part, whose kernels like their channels innermost."""
        return any(
            op.family == "convolution" and any(len(spec.shape) == 4 for spec in op.inputs)
            for op in self.ops
        )

    @property
    def draws_random(self) -> bool:
        """Whether operators draw random numbers: dropout, noise, stochastic depth."""
        return any(op.draws_random for op in self.ops)

    def draws_like(self, other: "Workload") -> bool:
        """Whether both draw their random numbers into memory of one order, so that each lands where it does.

        A generator fills memory from front to back: the same numbers are a different mask where the channels
        are innermost.
        """
        # In order: a generator that is ahead by one draw gives all later ones other numbers.
        return _drawn(self.ops) == _drawn(other.ops)

    def phase(self, phase: Phase) -> tuple[Op, ...]:
        """The ops of one phase, in order."""
        return tuple(op for op in self.ops if op.phase == phase)

    @property
    def flops(self) -> int:
        """FLOP of the whole step."""
        return sum(op.flops for op in self.ops)

    @property
    def bytes_moved(self) -> int:
        """Least bytes moved by the whole step, operator by operator."""
        return sum(op.bytes_moved for op in self.ops)

    @property
    def gradients(self) -> tuple[Parameter, ...]:
        """The parameters that receive gradients, in ready order."""
        by_name = {parameter.name: parameter for parameter in self.parameters}
        return tuple(by_name[name] for name in self.ready_order)

    @property
    def peak_memory_bytes(self) -> int:
        """Most live bytes at any point of the step."""
        return max((point.total_bytes for point in self.memory), default=0)

    def __repr__(self) -> str:
        trainable = sum(p.num_bytes for p in self.parameters if p.is_trainable)
        return (
            f"Workload({self.name}: {self.samples} samples, {len(self.ops)} ops, "
            f"{units.quantity(self.flops, 'FLOP')}, {units.num_bytes(self.bytes_moved)} moved, "
            f"{units.num_bytes(trainable)} of gradients, peak {units.num_bytes(self.peak_memory_bytes)})"
        )
