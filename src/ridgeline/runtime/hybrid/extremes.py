"""What gradients of `amax` and its like take for granted: that some element equals the result.

Backward compares the elements with the largest of them, the median, or what was scattered, and divides by how
many are equal. A compiled kernel keeps in single precision what it does not write, and compares that with a
result which was rounded to 16 bits: then none is equal, and every gradient is no number (torch 2.11 to 2.13,
on CPUs and GPUs). The compiler can round where the program says so.
"""

from typing import Any

from torch import fx

_EXTREMES = frozenset({
    *("amax", "amin", "aminmax", "max", "min", "median", "nanmedian"),
    *("norm", "vector_norm", "matrix_norm", "dist"),
    *("scatter_reduce", "index_reduce", "segment_reduce"),
})  # fmt: skip
"""Functions, methods and operators with such gradients; some with some of their arguments only."""


def rounding_options(graph: fx.GraphModule) -> dict[str, Any]:
    """The compiler's options for a graph: whether it rounds in kernels to the types that the graph names."""
    nodes = (
        node
        for module in graph.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )
    return {"emulate_precision_casts": True} if any(map(_is_extreme, nodes)) else {}


def _is_extreme(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.partition(".")[0].removeprefix("linalg_").rstrip("_") in _EXTREMES
