"""What torch's compiler does to operators that it fuses with nothing: it calls a library in another way."""

import msgspec

from ridgeline.simulator.pricing.costs import Prices
from ridgeline.simulator.pricing.dataflow import operator_name, spec_bytes
from ridgeline.workload import Op

_ADDING = frozenset(
    {"index_put", "index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward"}
)
"""Operators that add to elements by index. Source: torch/_inductor/lowering.py; with atomic additions."""
_NOT_ADDED = {"index_add": ("bfloat16",)}
"""What is left to the library, which sorts the indices.

Source: `index_add` in torch/_inductor/decomposition.py.
"""
_NOT_ATOMIC = ("int64", "bool")
"""What is never added atomically.

Source: `needs_fallback_due_to_atomic_add_limitations` in torch/_inductor/utils.py; also bfloat16 on GPUs
before compute capability 9.0, which is not told apart here.
"""
_TAKING = frozenset({"index", "index_select", "gather", "embedding"})
_INTERPOLATING = frozenset(
    f"upsample_{name}{suffix}"
    for name in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    for suffix in ("", "_backward")
)
"""The gradients are products about as fast as their bytes. Source: `benchmarks/resizing.py`."""
_LOOPS = _ADDING | _TAKING | _INTERPOLATING | {"scatter"}
"""Operators that gather or scatter by loops of the compiler's own."""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
ALIGNED = 8
"""Elements of 16 bits to whose multiples matrix products are padded.

Source: torch/_inductor/fx_passes/pad_mm.py.
"""


def writes_loop(op: Op) -> bool:
    """Whether the compiler writes a loop of its own for an operator that gathers or scatters.

    Eager torch sorts the indices before it adds by them, and such a loop is several times faster.
    """
    name = _name(op)
    if name == "scatter_reduce" and '"sum"' not in op.arguments:
        return False  # Source: `use_scatter_fallback` in torch/_inductor/utils.py
    left = (*_NOT_ATOMIC, *_NOT_ADDED.get(name, ()))
    return name in _LOOPS and not (name in _ADDING and op.dtype in left)


def takes_by_index(op: Op) -> bool:
    """Whether the operator reads its first input at places that others of its inputs name."""
    return _name(op) in _TAKING


def adds_by_index(op: Op) -> bool:
    """Whether the operator adds to places that its inputs name; its result is there when all have added."""
    return _name(op) in _ADDING


def indexed_input(op: Op) -> int | None:
    """The input that must be whole in memory before the loop begins; None: the loop makes it itself."""
    if not (takes_by_index(op) or adds_by_index(op)) or _name(op) == "embedding_dense_backward":
        return None
    return 0


def rewritten_seconds(list_: Prices, op: Op, seconds: float, precision: str = "as-is") -> float:
    """Seconds of a library's operator on a GPU as the compiler calls it; never more than as it is.

    Products of unaligned 16-bit matrices are padded, so they run at the rate of others of their size; the
    bias of a convolution is added by the kernel that comes next, where eager torch adds it in a pass of its
    own. Backward products run in the precision of the autocast region that the forward pass lies in, where
    eager torch takes that of their inputs.

    `seconds` is what the operator takes eagerly, `precision` that of the trace.
    """
    is_widened = precision == "bf16" and op.phase == "backward" and op.dtype == "float32"
    if _name(op) in _PRODUCTS and is_widened:
        op = _narrowed(op)
        seconds = min(seconds, list_.by_curve(op))
    if _name(op) in _PRODUCTS and _is_unaligned(op):
        return min(seconds, list_.by_curve(op))
    is_biased = len(op.inputs) == 3  # image, weight and bias
    if _name(op) == "convolution" and op.phase == "forward" and is_biased:
        saved_s = list_.copy_seconds(2 * sum(map(spec_bytes, op.outputs)))
        # The bias pass cannot take more than the whole; then only a curve tells.
        return seconds - saved_s if saved_s < seconds else min(seconds, list_.by_curve(op))
    return seconds


def _narrowed(op: Op) -> Op:
    """A float32 product as bf16 autocast runs it: `backward_pass_autocast` in torch/_functorch/config.py."""
    replace, dtype = msgspec.structs.replace, "bfloat16"
    return replace(
        op,
        dtype=dtype,
        inputs=tuple(replace(spec, dtype=dtype) for spec in op.inputs),
        outputs=tuple(replace(spec, dtype=dtype) for spec in op.outputs),
        bytes_read=op.bytes_read // 2,
        bytes_written=op.bytes_written // 2,
    )


def _name(op: Op) -> str:
    return operator_name(op).rstrip("_")


def _is_unaligned(op: Op) -> bool:
    if op.dtype not in ("bfloat16", "float16"):
        return False
    return any(size % ALIGNED for spec in op.inputs[-2:] for size in spec.shape[-2:])
