"""What gradients of `amax` and its like take for granted: that some element equals the result.

Backward compares the elements with the largest of them, the median, or what was scattered, and divides by how
many are equal. A compiled kernel keeps in single precision what it does not write, and compares that with a
result which was rounded to 16 bits: then none is equal, and every gradient is no number (torch 2.11 to 2.13,
on CPUs and GPUs). The compiler can round where the program says so.
"""

import math
from typing import Any

from torch import fx

_ALWAYS = frozenset({"amax", "amin", "aminmax"})
_OF_ALL = frozenset({"max", "min", "median", "nanmedian"})
"""With one argument; along a dimension they give places, and of two tensors the larger element of each."""
_NORMS = frozenset({"norm", "vector_norm", "matrix_norm", "dist"})
"""Where the order is infinite."""
_SCATTERED = frozenset({"scatter_reduce", "index_reduce", "segment_reduce"})
"""Where the largest or the smallest is kept."""
_KEPT = frozenset({"amax", "amin", "max", "min"})


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
    name = name.partition(".")[0].removeprefix("linalg_").rstrip("_")
    given = (*node.args, *node.kwargs.values())
    if name in _OF_ALL:
        return len(given) == 1
    if name in _NORMS:
        # Positions differ between these functions, and nothing else that they take is infinite.
        return any(isinstance(one, float) and math.isinf(one) for one in given)
    if name in _SCATTERED:
        return not _KEPT.isdisjoint(one for one in given if isinstance(one, str))
    return name in _ALWAYS
