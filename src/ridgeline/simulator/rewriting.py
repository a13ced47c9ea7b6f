"""What torch's compiler does to operators that it fuses with nothing: it calls a library in another way."""

from ridgeline.simulator.costs import Prices
from ridgeline.simulator.dataflow import operator_name, spec_bytes
from ridgeline.workload import Op

_ADDING = frozenset(
    {"index_put", "index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward"}
)
"""Operators that add to elements by index. Source: torch/_inductor/lowering.py; with atomic additions, which
it does not use for 16 bits."""
_LOOPS = _ADDING | {"index", "index_select", "gather", "scatter", "embedding"}
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
    if name not in _LOOPS:
        return False
    return name not in _ADDING or op.dtype in ("float32", "float64")


def rewritten_seconds(list_: Prices, op: Op, seconds: float) -> float:
    """Seconds of a library's operator on a GPU as the compiler calls it; never more than as it is.

    Products of unaligned 16-bit matrices are padded, so they run at the rate of others of their size; the
    bias of a convolution is added by the kernel that comes next, where eager torch adds it in a pass of its
    own.

    Args:
        list_: Prices at the setting.
        op: Priced.
        seconds: What it takes eagerly.
    """
    if _name(op) in _PRODUCTS and _is_unaligned(op):
        return min(seconds, list_.by_curve(op))
    is_biased = len(op.inputs) == 3  # image, weight and bias
    if _name(op) == "convolution" and op.phase == "forward" and is_biased:
        saved_s = list_.copy_seconds(2 * sum(map(spec_bytes, op.outputs)))
        return seconds - saved_s if saved_s < seconds else min(seconds, list_.by_curve(op))
    return seconds


def _name(op: Op) -> str:
    return operator_name(op).rstrip("_")


def _is_unaligned(op: Op) -> bool:
    if op.dtype not in ("bfloat16", "float16"):
        return False
    return any(size % ALIGNED for spec in op.inputs[-2:] for size in spec.shape[-2:])
