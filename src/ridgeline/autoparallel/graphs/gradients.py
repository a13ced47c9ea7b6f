"""Functions whose results are differentiated by the caller: forward and backward as two programs.

Both are traced at once, as one graph that takes the gradients of the results and gives those of inputs and
state. The graph is cut where it first needs the gradients of the results; what is computed before and needed
after is saved in between, as autograd does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.aliasing import must_stay
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.autoparallel.graphs.unused import run_partly
from ridgeline.capture.flat_program import FlatProgram, flatten_program
from ridgeline.errors import CaptureError
from ridgeline.tensors.nests import tensors_in

Call = Callable[..., Any]


class Halves(NamedTuple):
    """A differentiable function as two programs.

    Attributes:
        forward: Arguments to (tensors of the result, saved tensors).
        backward: (saved tensors, then gradients of the differentiable results) to gradients of `wanted`.
        wanted: State that gets gradients.
        given: Positions of the arguments' tensors that get gradients, before those of `wanted`.
        roots: Positions of the results that are differentiable.
        has_gradient: For each of `given` and `wanted`, whether there is a gradient.
        rebuild: Makes the result of its tensors.
    """

    forward: Program
    backward: Program
    wanted: tuple[Tensor, ...]
    given: tuple[int, ...]
    roots: tuple[int, ...]
    has_gradient: tuple[bool, ...]
    rebuild: Callable[[Sequence[Tensor]], Any]


def trace_halves(fn: Call, args: tuple[Any, ...], program: Program) -> Halves:
    """Trace a function together with the backward pass of its results.

    `program` is the function as it was traced alone, which says what state it uses.

    Raises:
        CaptureError: a result is an argument or state itself, or backward cannot be traced.
    """
    # Out of an operator of ours such a result would come as another tensor than the one that the function
    # gives.
    if any(slot in program.sources for slot in program.outputs) or program.returns_views:
        raise CaptureError(
            "wanted results that are computed, got one that is an argument or state itself, or a view of it; "
            "return a clone of it, or call the function under torch.no_grad()"
        )
    leaves = pytree.tree_leaves(args)
    given = tuple(index for index, leaf in enumerate(leaves) if leaf.requires_grad)
    wanted = tuple(tensor for tensor in program.state.values() if tensor.requires_grad)
    roots: list[int] = []

    def joint(args: tuple[Any, ...], tangents: list[Tensor]) -> tuple[Any, Any]:
        result = fn(*args)
        tensors = tensors_in(result)
        # Known only while it is traced: results without gradients have no tangent, and autograd refuses them.
        roots[:] = [index for index, tensor in enumerate(tensors) if tensor.requires_grad]
        ends = [tensors_in(args)[index] for index in given]
        # A parameter may be used in another branch than that of this call; it gets None, as from
        # `.backward()`.
        grads = torch.autograd.grad(
            [tensors[index] for index in roots], [*ends, *wanted], tangents, allow_unused=True
        )
        return tensors, list(grads)

    with torch.enable_grad():
        # Autograd wants gradients of the results' shapes before the trace that gives these shapes: so there
        # is a trace before.
        tangents = _example_tangents(fn, args)
        flat = flatten_program(joint, (args, tangents), gradients=True, one_device=False)
    num_results = len(program.outputs) - len(program.grads)
    forward, backward = _cut(flat, num_results, len(tangents))
    has_gradient = tuple(
        num_results + index not in flat.constants for index in range(len(given) + len(wanted))
    )
    return Halves(
        Program(forward),
        Program(backward),
        wanted,
        given,
        tuple(roots),
        has_gradient,
        program.rebuild,
    )


def _example_tangents(fn: Call, args: tuple[Any, ...]) -> list[Tensor]:
    """Gradients of the differentiable results, of the right shapes: from a trace, so nothing runs."""
    shapes: list[Tensor] = []

    def watched(*args: Any) -> Any:
        result = fn(*args)
        shapes[:] = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
        return result

    trace_program(watched, args)
    return [torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in shapes]


def _cut(flat: FlatProgram, num_results: int, num_tangents: int) -> tuple[FlatProgram, FlatProgram]:
    """The graph before the first operator that needs gradients of the results, and from there on."""
    # A detached result would be a value of the backward part, although forward has computed it; and saved for
    # it, so that scripts could not change it in place.
    output = flat.graph.graph.output_node()
    output.args = pytree.tree_map_only(fx.Node, _undetached, output.args)
    flat.graph.graph.eliminate_dead_code(is_impure_node=must_stay)
    nodes = list(flat.graph.graph.nodes)
    places = [node for node in nodes if node.op == "placeholder"]
    tangents = places[len(places) - num_tangents :]
    late: set[fx.Node] = set(tangents)
    for node in nodes:
        if node.op == "call_function" and (
            # Once backward has begun, all that follows is backward's: what it recomputes belongs there too.
            len(late) > num_tangents or late & set(node.all_input_nodes)
        ):
            late.add(node)
    ends = pytree.tree_leaves(output.args)
    results, grads = ends[:num_results], ends[num_results:]
    needed = dict.fromkeys(
        value
        for node in [*(n for n in nodes if n in late and n.op == "call_function")]
        for value in node.all_input_nodes
        # Constants of the graph are copied into both parts, and need not be saved.
        if value not in late and value.op != "get_attr"
    )
    # A gradient that depends on no tangent (a constant one) is computed in forward and handed on.
    needed |= dict.fromkeys(grad for grad in grads if grad not in late)
    state = dict(zip(places, flat.state.items(), strict=False))
    saved = [node for node in needed if node not in state]
    early = [node for node in nodes if node.op == "call_function" and node not in late]
    sources = [place for place in places if place not in tangents]
    forward = _program(
        flat, sources, early, [results, saved], flat.state, flat.inputs[: len(sources) - len(state)]
    )
    used = {state[node][0]: state[node][1] for node in needed if node in state}
    backward = _program(
        flat,
        [*(node for node in needed if node in state), *saved, *tangents],
        [node for node in nodes if node in late and node.op == "call_function"],
        [grads],
        used,
        [node.meta["val"] for node in (*saved, *tangents)],
    )
    return forward, backward


def _undetached(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten.detach.default:
        (node,) = node.all_input_nodes
    return node


def _program(
    flat: FlatProgram,
    places: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    results: Sequence[Sequence[fx.Node]],
    state: dict[str, Tensor],
    inputs: Sequence[Tensor],
) -> FlatProgram:
    """A part of the graph as a program of its own, whose result is a tuple of lists."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for index, node in enumerate(places):
        copies[node] = graph.placeholder(f"source_{index}")
        copies[node].meta.update(node.meta)
    for node in nodes:
        for value in node.all_input_nodes:
            if value.op == "get_attr" and value not in copies:
                copies[value] = graph.node_copy(value)
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for ends in results for node in ends])
    tensors = [node.meta["val"] for ends in results for node in ends]
    return FlatProgram(
        graph=fx.GraphModule(flat.graph, graph),
        state=state,
        inputs=list(inputs),
        input_tree=pytree.tree_structure(tuple(inputs)),
        output_tree=pytree.tree_structure(tuple([0] * len(ends) for ends in results)),
        outputs=tensors,
        constants={},
    )


class Differentiable:
    """Forward and backward in one way each, called like the function; autograd goes through it."""

    def __init__(self, halves: Halves, forward: Call, backward: Call) -> None:
        self.halves = halves
        self.forward = forward
        self.backward = backward
        # State that backward reads, so that autograd refuses it where a script has written it since forward;
        # what the function itself writes (running statistics) changes with its next call.
        written = halves.forward.written_storages()
        self.watched = [
            tensor
            for tensor in halves.backward.state.values()
            if tensor.untyped_storage().data_ptr() not in written
        ]

    def __call__(self, *args: Any) -> Any:
        """The result, with a graph where gradients are enabled."""
        return self.halves.rebuild(
            _Apply.apply(self, *pytree.tree_leaves(args), *self.halves.wanted)
        )

    def close(self) -> None:
        """End the threads and give up the graphs of both."""
        close_call(self.forward)
        close_call(self.backward)


class _Apply(torch.autograd.Function):
    """The two programs as one operator of autograd."""

    @staticmethod
    def forward(*args: Any, **_: Any) -> Any:
        ctx, call, *tensors = args
        num_inputs = len(tensors) - len(call.halves.wanted)
        results, saved = call.forward(*tensors[:num_inputs])
        ctx.call, ctx.num_inputs = call, num_inputs
        ctx.set_materialize_grads(False)
        # Not as attributes: only saved tensors are freed with the graph, and watched for writes in place.
        ctx.save_for_backward(*saved, *call.watched)
        ctx.num_saved = len(saved)
        roots = call.halves.roots
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in roots))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _backward(ctx, *grad_outputs)


@once_differentiable
def _backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """What autograd asks for: nothing for the call itself, then gradients of inputs and of state."""
    halves = ctx.call.halves
    saved = ctx.saved_tensors[: ctx.num_saved]
    roots = [tangents[index] for index in halves.roots]
    # The trace had dense gradients; autograd hands in expanded ones for sums and means.
    used = [tangent.contiguous() for tangent in roots if tangent is not None]
    if len(used) == len(roots):
        (grads,) = ctx.call.backward(*saved, *used)
    else:
        grads = run_partly(halves.backward, saved, roots)
    remaining = iter(grads)
    found = [next(remaining) if has else None for has in halves.has_gradient]
    inputs: list[Tensor | None] = [None] * ctx.num_inputs
    for position, grad in zip(halves.given, found, strict=False):
        inputs[position] = grad
    return (None, *inputs, *found[len(halves.given) :])


def differentiated(call: Call, wanted: Sequence[Tensor]) -> Call:
    """Forward and backward with gradients of one: what is compared and timed."""

    def run(*args: Any) -> Any:
        with torch.enable_grad():
            result = call(*args)
            roots = [tensor for tensor in tensors_in(result) if tensor.requires_grad]
            ends = [leaf for leaf in pytree.tree_leaves(args) if leaf.requires_grad]
            ones = [torch.ones_like(root) for root in roots]
            grads = torch.autograd.grad(roots, [*ends, *wanted], ones, allow_unused=True)
        return pytree.tree_map_only(Tensor, torch.detach, result), grads

    return run


def close_call(call: Any) -> None:
    """End the threads of a way, or give up its graph; plain functions have neither."""
    close = getattr(call, "close", None)
    if close is not None:
        close()
