"""A compiled step in parts, each of which hands out its gradients while those before it are still computed.

A compiled program is one node to autograd: all its gradients come when its backward pass is over. So what
was read of a forward pass is cut where the buckets of gradients end, and every part is compiled by itself:
the backward pass of the last part fills the first bucket, which leaves while that of the part before runs.

The compiler fuses nothing across a cut, and calls one program more for each. What would send all gradients
in one bucket is not cut.

Source: the cut is that of torch's `DDPOptimizer`, which compiles the parts here as well; its bounds are two
sizes of its own, where ours are those of a plan.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends import distributed as torch_parts
from torch._dynamo.utils import detect_fake_mode
from torch.fx.passes.split_module import split_module

from ridgeline.plan import cut_buckets

CompileGraph = Callable[[fx.GraphModule, Sequence[Tensor]], Callable[..., Any]]

IN_ONE = "compiled in one, so that gradients come at the end of backward: "
"""How a note begins on why a step is not in parts."""


def compile_in_parts(
    graph: fx.GraphModule,
    inputs: Sequence[Tensor],
    *,
    compile_graph: CompileGraph,
    bucket_bytes: Sequence[int],
    notes: list[str],
) -> Callable[..., Any]:
    """Compile a forward pass, its backward included, in as many parts as its gradients have buckets.

    Args:
        graph: What was read of the forward pass.
        inputs: Examples of its inputs.
        compile_graph: Compiles a part.
        bucket_bytes: Limits of the buckets; see `cut_buckets`.
        notes: Receives where it is not cut, and why.

    Cost: Compiles.
    """
    part_of = parts_of(graph, bucket_bytes)
    if not part_of or len(set(part_of.values())) < 2:
        return compile_graph(graph, inputs)
    if torch_parts.has_higher_order_op(graph):
        notes.append(f"{IN_ONE}it calls other graphs, which torch does not cut (checkpoints, say)")
        return compile_graph(graph, inputs)
    whole = split_module(graph, None, part_of.__getitem__)  # type: ignore[arg-type]
    # Guards refer to where values came from, which splitting would lose.
    torch_parts.propagate_dynamo_source(graph, whole)
    torch_parts.propagate_metadata(graph, whole)
    fakes = detect_fake_mode(inputs) or torch._subclasses.fake_tensor.FakeTensorMode()  # noqa: SLF001
    compiler = torch_parts.SubmodCompiler(whole, compile_graph, fakes)
    with torch._dynamo.utils._disable_saved_tensors_hooks_during_tracing():  # noqa: SLF001
        compiler.run(*inputs)
    whole.recompile()
    return whole


def parts_of(graph: fx.GraphModule, bucket_bytes: Sequence[int]) -> dict[fx.Node, int]:
    """In which part each operator of a forward pass is, counted from its begin; empty without gradients.

    Gradients are complete in the reverse of the order in which their parameters are first used. A part begins
    with the operator whose backward completes the last gradient of its bucket.
    """
    first_used = _first_used(graph)
    # Backward runs from the end: the parameter that is used last has its gradient first.
    order = sorted(first_used, key=first_used.__getitem__, reverse=True)
    if not order:
        return {}
    sizes = [(p.nbytes, str(p.dtype).removeprefix("torch.")) for p in order]
    begins = sorted(
        {
            # The smallest place: only with the backward of that operator is the bucket complete.
            min(first_used[order[index]] for index in bucket)
            for bucket in cut_buckets(sizes, bucket_bytes)
        }
    )
    found: dict[fx.Node, int] = {}
    part = 0
    for place, node in enumerate(graph.graph.nodes):
        if node.op in ("placeholder", "output"):
            continue
        while part + 1 < len(begins) and place >= begins[part + 1]:
            part += 1
        found[node] = part
    return found


def _first_used(graph: fx.GraphModule) -> dict[nn.Parameter, int]:
    """Trainable parameters, each with the place of the first operator that reads it."""
    found: dict[nn.Parameter, int] = {}
    for place, node in enumerate(graph.graph.nodes):
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        for value in (source.meta.get("example_value") for source in node.all_input_nodes):
            if isinstance(value, nn.Parameter) and value.requires_grad:
                found.setdefault(value, place)
    return found
