"""`Plan`: how to run a training step, in the same words for people and for the search."""

from collections.abc import Sequence
from typing import ClassVar, Literal, TypeGuard

import msgspec

from ridgeline.codec import Noun, Value
from ridgeline.errors import PlanError
from ridgeline.given import Count, Whole, check_fields
from ridgeline.synchronisation import check_words, is_exact
from ridgeline.synchronisation.sync import Sync

Execution = Literal[
    "eager",
    "script",
    "compiled",
    "regional",
    "graph",
    "compiled+graph",
    "regional+graph",
    "model-graph",
    "compiled+model-graph",
    "step-graph",
    "packaged",
]
Precision = Literal["as-is", "tf32", "bf16", "fp16"]
MemoryFormat = Literal["as-is", "channels_last"]
OptimizerForm = Literal["as-is", "fused"]
Kernels = Literal["default", "combined"]
RandomNumbers = Literal["as-is", "compiled"]
Origin = Literal["user", "search", "default"]


class Layout(Value, frozen=True, kw_only=True):
    """Workers along each axis of parallelism; their product is the number of workers."""

    data: Whole = 1
    shard: Whole = 1
    tensor: Whole = 1
    pipeline: Whole = 1


class Feed(Value, frozen=True, kw_only=True):
    """How input reaches the device: `depth` batches are prepared ahead (0: none)."""

    depth: Count = 2


class Alternative(Value, frozen=True, kw_only=True):
    """What another value of a knob would cost; `is_measured` distinguishes trials from predictions."""

    value: str
    step_s: float
    is_measured: bool = False


class Choice(Value, frozen=True, kw_only=True):
    """Why one knob of a plan has its value."""

    knob: str
    value: str
    origin: Origin
    reason: str
    alternatives: tuple[Alternative, ...] = ()


class Plan(Noun, frozen=True, kw_only=True):
    """How to run a training step; written by hand or made by `rl.choose()`.

    `repr(plan)` is the program that makes it again (without `choices`, the record of reasons).
    `threads` 0 means: leave the number of threads as it is.

    `memory_format` `channels_last` keeps images and convolution weights with their channels innermost.
    `optimizer` `fused` takes the optimizer's fused kernels, as a captured step always does. `kernels`
    `combined` has the compiler join small independent kernels and compute weight gradients beside the chain
    of a replayed step. `random` `compiled` lets compiled programs draw random numbers of their own, and
    numbers that are drawn for images land elsewhere in them with the channels innermost.
    """

    kind: ClassVar[str] = "plan"

    execution: Execution = "eager"
    precision: Precision = "as-is"
    memory_format: MemoryFormat = "as-is"
    optimizer: OptimizerForm = "as-is"
    kernels: Kernels = "default"
    random: RandomNumbers = "as-is"
    workers: Whole = 1
    threads: Count = 0
    accumulate: Whole = 1
    layout: Layout | None = None
    """None: all workers along the data axis."""
    sync: Sync = Sync()
    feed: Feed = Feed()
    choices: tuple[Choice, ...] = ()

    def __post_init__(self) -> None:
        """Reject unknown words, numbers out of range, and layouts that contradict `workers`.

        Raises:
            PlanError: names the field, what it may be, and what it was.
        """
        # Not left to the decoder: plans that are written in Python are held to no annotation.
        check_fields(self, PlanError, "the plan")
        check_words(self.sync)
        check_fields(self.feed, PlanError, "the plan", "feed.")
        limits = self.sync.bucket_bytes
        is_many = isinstance(limits, Sequence) and len(limits) > 0
        if not is_many or not all(is_whole(n) and n >= 1 for n in limits):
            raise PlanError(
                "wanted sync.bucket_bytes with at least one entry, each >= 1 byte, got "
                f"{limits} in the plan; for example (4194304,)"
            )
        check_fields(self.sync, PlanError, "the plan", "sync.")
        if self.layout is not None:
            axes = self.layout
            check_fields(axes, PlanError, "the plan", "layout.")
            product = axes.data * axes.shard * axes.tensor * axes.pipeline
            if product != self.workers:
                raise PlanError(
                    f"wanted a layout over workers={self.workers}, got {axes} with product {product} "
                    "in the plan; make the product of its axes equal to workers"
                )

    @property
    def exact(self) -> bool:
        """Whether the maths is that of the plain step (up to the order of additions)."""
        return self.precision == "as-is" and self.random == "as-is" and is_exact(self.sync)

    @property
    def settings(self) -> "Plan":
        """The plan without its record of reasons."""
        return msgspec.structs.replace(self, choices=())

    def __repr__(self) -> str:
        return f"rl.{_program(self.settings)}"


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, as plans count: an `int`, which True and 2.0 are not."""
    return isinstance(value, int) and not isinstance(value, bool)


ALIGNMENT_BYTES = 64
"""Start of every gradient in a bucket: a cache line, enough for the widest vector loads of fused kernels."""


def aligned_elements(num_elements: int, element_bytes: int) -> int:
    """Elements that a gradient takes in a bucket; the next one starts at a multiple of `ALIGNMENT_BYTES`."""
    step = max(1, ALIGNMENT_BYTES // element_bytes)
    return -(-num_elements // step) * step


def cut_buckets(
    gradients: Sequence[tuple[int, str]], bucket_bytes: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Which gradients travel together: indices into `gradients`, one tuple a bucket, in launch order.

    Gradients are taken in ready order; those of one dtype fill a bucket until it holds at least the
    limit of its position, then it is closed and may be launched. What is open at the end is closed in
    the order of its last gradient. Runtime and simulator both call this, so they agree by construction.

    Args:
        gradients: (bytes, dtype) of each gradient, in the order in which they become ready.
        bucket_bytes: Limit of each bucket in closing order; the last entry serves all later ones.
    """
    closed: list[tuple[int, ...]] = []
    open_members: dict[str, list[int]] = {}
    open_bytes: dict[str, int] = {}
    for index, (num_bytes, dtype) in enumerate(gradients):
        open_members.setdefault(dtype, []).append(index)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + num_bytes
        # By the number of closed buckets, of whatever dtype: that is the order in which they leave.
        limit = bucket_bytes[min(len(closed), len(bucket_bytes) - 1)]
        if open_bytes[dtype] >= limit:
            closed.append(tuple(open_members.pop(dtype)))
            del open_bytes[dtype]
    # What never filled leaves when backward ends, first what was complete first.
    closed.extend(tuple(members) for members in sorted(open_members.values(), key=lambda m: m[-1]))
    return tuple(closed)


def _program(value: Value) -> str:
    """Constructor call with the fields that differ from their defaults."""
    # Every field of a plan has a default, so that what is printed can be what differs.
    default = type(value)()
    parts = []
    for field in msgspec.structs.fields(value):
        mine = getattr(value, field.name)
        if mine != getattr(default, field.name):
            inner = f"rl.{_program(mine)}" if isinstance(mine, Value) else repr(mine)
            parts.append(f"{field.name}={inner}")
    return f"{type(value).__name__}({', '.join(parts)})"
