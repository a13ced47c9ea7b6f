"""Passes over the graph of forward and backward that keep torch's compiler from changing results.

A value that is written into a buffer (a count, an average) and that backward needs may be computed again
there from the buffer, which by then holds the new value: gradients come out wrong. So such values are saved.

It puts zeros for `x * 0`, so that a loss of NaN, or an infinite one, comes out as 0 and training goes on as
if nothing were wrong, with gradients of 0. A factor of 0.0 it leaves alone.

It drops the factor of `torch.add(x, a @ b, alpha=0.1)`, as averages and optimizers are often written,
where it makes the product and the sum one call of a library.
"""

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils.checkpoint import CheckpointPolicy

_COPY = torch.ops.aten.copy_.default
_SUM, _PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_PRODUCTS = (_PRODUCT, torch.ops.aten.mul.Scalar)


class SaveWrites(CustomGraphPass):
    """Marks, in the graph of forward and backward, what reads inputs that the forward pass writes."""

    def __call__(self, graph: fx.Graph) -> None:
        """Forbid to compute those again."""
        for node in graph.find_nodes(op="call_function", target=_COPY):
            target = node.args[0]
            if isinstance(target, fx.Node) and target.op == "placeholder":
                _save_readers(target)

    def uuid(self) -> str:
        """What distinguishes one version of this pass from another in the compiler's cache."""
        return "ridgeline.save_writes.2"


def _save_readers(node: fx.Node) -> None:
    """Save what is computed from a tensor; views of it are read through."""
    for user in node.users:
        # The write itself gives what is in the buffer afterwards, which backward may read as it is.
        if user.target is _COPY or user.op != "call_function":
            continue
        if getattr(user.target, "is_view", False):
            _save_readers(user)
        else:
            user.meta["recompute"] = CheckpointPolicy.MUST_SAVE


class KeepWritten(CustomGraphPass):
    """Has the graph of forward and backward compute what is written: `keep_written`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Exchange what would be computed otherwise."""
        keep_written(graph)

    def uuid(self) -> str:
        """What distinguishes one version of this pass from another in the compiler's cache."""
        return "ridgeline.keep_written.1"


def keep_written(graph: fx.Graph) -> None:
    """Write products with 0, and sums with a factor, as the compiler keeps them; no type changes.

    Args:
        graph: Of ATen's operators, with example values in `meta["val"]`.
    """
    _keep_zero_products(graph)
    _multiply_before_sums(graph)


def _keep_zero_products(graph: fx.Graph) -> None:
    """Exchange factors of 0 for 0.0 in products that are floating point or complex.

    Source: `UniformValueConstantFolder._add_peephole_patterns` of torch 2.13, which asks for an `int`.
    """
    for product in _PRODUCTS:
        for node in graph.find_nodes(op="call_function", target=product):
            # Whole numbers times 0.0 would be of another type, and there is no NaN among them.
            if _has_fractions(node):
                node.args = tuple(
                    0.0 if isinstance(factor, int) and factor == 0 else factor
                    for factor in node.args
                )


def _multiply_before_sums(graph: fx.Graph) -> None:
    """Write `add(x, y, alpha=a)` as a product and a sum, as which it is compiled in any case.

    Source: the pattern `addmm` of torch 2.13 (`_inductor/fx_passes/post_grad.py`), which matches sums with
    any `alpha`, and drops it.
    """
    for node in graph.find_nodes(op="call_function", target=_SUM):
        factor, term = node.kwargs.get("alpha", 1), node.args[1]
        if factor == 1 or not isinstance(term, fx.Node) or not _has_fractions(term):
            continue
        with graph.inserting_before(node):
            product = graph.call_function(_PRODUCT, (term, factor))
        product.meta["val"] = _PRODUCT(term.meta["val"], factor)
        node.args = (node.args[0], product)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}


def _has_fractions(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
