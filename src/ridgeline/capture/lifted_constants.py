"""Tensors that a trace found outside become inputs of the graph."""

from torch import Tensor, fx


def lift_constants(graph: fx.GraphModule, position: int) -> list[Tensor]:
    """Make inputs of the tensors that the traced code brought along (class weights, masks, ...).

    So a change in place is seen by the program, and a package holds them. Returns these very tensors.

    Args:
        graph: Changed: its `get_attr` nodes become inputs.
        position: Number of the inputs that they follow.
    """
    nodes = [node for node in graph.graph.nodes if node.op == "get_attr"]
    by_target: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    first = next(node for node in graph.graph.nodes if node.op != "placeholder")
    # Arguments are taken by the order of these nodes, so constants have to stand right behind the state.
    anchor = placeholders[position] if position < len(placeholders) else first
    for node in nodes:
        target = str(node.target)
        value = getattr(graph, target)
        if not isinstance(value, Tensor):
            continue
        if target not in by_target:
            with graph.graph.inserting_before(anchor):
                by_target[target] = graph.graph.placeholder(f"constant_{len(constants)}")
            by_target[target].meta = dict(node.meta)
            constants.append(value)
        node.replace_all_uses_with(by_target[target])
        graph.graph.erase_node(node)
    for target in by_target:
        delattr(graph, target)
    graph.recompile()
    return constants
