"""A whole function translated by torch's compiler, called without the compiler's guards.

`torch.compile` checks at every call that nothing it assumed has changed; for small functions that takes
longer than the work. Here the function is traced once into a graph whose inputs are the module's tensors
and the arguments, Inductor translates the graph, and the caller checks the few things that matter itself.
Tensors are passed by reference at every call, so updates in place are seen.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ridgeline.callables.calls.equivalence import check_results
from ridgeline.capture.interception import scripted_as_written
from ridgeline.capture.lifted_constants import lift_constants
from ridgeline.errors import CaptureError, first_line
from ridgeline.programs.inductor import FAILURES, require_written
from ridgeline.programs.module_call import call_with, places
from ridgeline.tensors.copies import strided_copy
from ridgeline.tensors.nests import builder

SETTINGS: dict[str, Any] = {
    "fallback_random": True,  # the compiler's own random numbers differ from those of the eager program
    "size_asserts": False,  # the caller has compared shapes and strides
    "alignment_asserts": False,
    "triton.cudagraphs": False,  # capturing is a mode of its own here
}

SERIAL_ELEMENTS = 1 << 19
"""A program that computes fewer elements than this runs on one thread: one core does them in some 50 us, and
threads that have to wait for each other lose more than they gain as soon as anything else runs."""


class TracedFunction:
    """A function as one graph: `graph(*state, *tensors of the arguments)` gives the tensors of the result.

    Args:
        fn: The function or module.
        args: Example arguments; shapes, dtypes and everything that is not a tensor are fixed to theirs.

    Attributes:
        graph: The traced graph; all that it reads are its inputs.
        state: The tensors to pass first, sharing memory with those of the module.

    Raises:
        CaptureError: it cannot be traced; says what stopped it.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._fn = fn
        leaves, self._structure = pytree.tree_flatten(args)
        self._leaves = leaves
        self.num_inputs = sum(isinstance(leaf, Tensor) for leaf in leaves)
        self._names: list[str] = []
        tensors: list[Tensor] = []
        if isinstance(fn, nn.Module):
            for name, tensor in (*fn.named_parameters(), *fn.named_buffers()):
                self._names.append(name)
                # Detached: they share memory with the module's own, and the trace is one of inference.
                tensors.append(tensor.detach())
        # Clones, so that one tensor given twice does not become one input of the graph.
        inputs = [strided_copy(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self._result_leaves: list[Any] = []
        self._result_structure: Any = None
        # Ours last: they stand in for the compiler's own of the same operators, and hand on what they leave
        # alone.
        table = {**select_decomp_table(), **MATRIX_VECTOR}
        # Inductor gets a graph without writes in place; functionalisation adds the copies back that are
        # visible outside.
        program = torch.func.functionalize(self._program, remove="mutations")
        try:
            with (
                inductor_config.patch(fallback_random=True),
                scripted_as_written(),
                torch.no_grad(),
            ):
                self.graph = make_fx(
                    program,
                    decomposition_table=table,
                    tracing_mode="fake",
                    _allow_non_fake_inputs=True,
                )(*tensors, *inputs)
        except FAILURES as error:
            reads_values = "DataDependent" in type(error).__name__
            advice = (
                "; its control flow must not depend on values of tensors" if reads_values else ""
            )
            raise CaptureError(
                f"wanted to trace the function as one graph, got {type(error).__name__}: "
                f"{first_line(error)}{advice}"
            ) from error
        constants = lift_constants(self.graph, len(tensors))
        self.state = tensors + [tensor.detach() for tensor in constants]
        self.example = [*self.state, *inputs]

    def _program(self, *flat: Tensor) -> tuple[Tensor, ...]:
        split = len(self._names)
        inputs = iter(flat[split:])
        args = pytree.tree_unflatten(
            [next(inputs) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves],
            self._structure,
        )
        if isinstance(self._fn, nn.Module):
            named = dict(zip(self._names, flat[:split], strict=True))
            result = call_with(self._fn, places(self._fn, named), args)
        else:
            result = self._fn(*args)
        check_results(result)
        leaves, self._result_structure = pytree.tree_flatten(result)
        self._result_leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))

    def compile(self) -> Callable[..., Any]:
        """The function translated by Inductor, called with the original arguments.

        The arguments must have the example's structure, shapes, dtypes, devices and strides.

        Raises:
            CaptureError: the compiler cannot take the graph, or a tensor that it reads.

        Cost: Seconds to minutes.
        """
        require_written(self.example)
        known = inductor_config.get_config_copy()
        settings = {key: value for key, value in SETTINGS.items() if key in known}
        if _num_elements(self.graph) < SERIAL_ELEMENTS:
            settings["cpp.threads"] = 1
        output = next(iter(reversed(self.graph.graph.nodes)))
        # Else the compiler may give results in strides of its own choice.
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        try:
            with inductor_config.patch(settings), torch.no_grad():
                compiled = compile_fx_inner(
                    self.graph,
                    self.example,
                    static_input_idxs=tuple(range(len(self.state))),
                    is_inference=True,
                )
        except FAILURES as error:
            raise CaptureError(
                f"wanted to compile the function, got {type(error).__name__}: {first_line(error)}"
            ) from error
        # What the compiler returns adds bookkeeping to every call that only its own caches need.
        return self._with_arguments(getattr(compiled, "current_callable", None) or compiled)

    def _with_arguments(self, run: Callable[[list[Tensor]], Any]) -> Callable[..., Any]:
        """`run` on a flat list of tensors, made callable with the original arguments."""
        state = self.state
        is_flat = all(isinstance(leaf, Tensor) for leaf in self._leaves) and (
            self._structure == pytree.tree_structure(tuple(self._leaves))
        )
        if is_flat and self._is_tensor == [True] and self._result_structure.is_leaf():
            return _single(run, state)
        leaves, is_tensor = self._result_leaves, self._is_tensor
        build = builder(self._result_structure)

        def call(*args: Any) -> Any:
            given = args if is_flat else pytree.tree_leaves(args)
            tensors = iter(run([*state, *(leaf for leaf in given if isinstance(leaf, Tensor))]))
            return build(
                [
                    next(tensors) if tensor else leaf
                    for leaf, tensor in zip(leaves, is_tensor, strict=True)
                ]
            )

        return call


def _single(run: Callable[[list[Tensor]], Any], state: list[Tensor]) -> Callable[..., Any]:
    """The call of a program over tensors that gives one tensor: nothing to take apart."""

    def call(*inputs: Tensor) -> Any:
        return run([*state, *inputs])[0]

    return call


def _row_product(row: Tensor, weight: Tensor) -> Tensor | None:
    """`row @ weight` for a single row, as products and a sum; None for other matrices.

    A matrix library needs microseconds to start for what is one pass over the weight. Written out, the
    compiler fuses it with its neighbours, and all layers of a small network become one kernel.
    """
    if row.dim() == 2 and row.shape[0] == 1 and weight.stride(0) == 1 and row.is_floating_point():
        return (row.unsqueeze(1) * weight.t().unsqueeze(0)).sum(-1)
    return None


def _addmm(bias: Tensor, row: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    product = _row_product(row, weight) if beta == alpha == 1 else None
    if product is not None:
        return bias + product
    original = select_decomp_table().get(torch.ops.aten.addmm.default)
    return original(bias, row, weight, beta=beta, alpha=alpha) if original else NotImplemented


def _mm(row: Tensor, weight: Tensor) -> Any:
    product = _row_product(row, weight)
    if product is not None:
        return product
    original = select_decomp_table().get(torch.ops.aten.mm.default)
    return original(row, weight) if original else NotImplemented


MATRIX_VECTOR = {torch.ops.aten.addmm.default: _addmm, torch.ops.aten.mm.default: _mm}


def _num_elements(graph: GraphModule) -> int:
    """Elements that the operators compute, fused or not; views compute none."""
    total = 0
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor) and not _is_view(node.target):
            total += value.numel()
    return total


def _is_view(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
