"""A pass over compiled backward graphs: weight gradients leave the critical path.

The backward pass is a chain: the gradient of each layer's input is needed by the layer before. Gradients of
weights are not needed before the end, yet the compiler puts them into the same queue. Where a layer
leaves parts of the GPU idle, as all layers of small batches do, they fit beside the chain.
"""

import operator
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from ridgeline.capture import split_backward as split_backward_module
from ridgeline.capture.split_backward import split_backward
from ridgeline.execution import BESIDE_BYTES, BESIDE_FLOPS
from ridgeline.programs.beside import operators
from ridgeline.programs.beside.operators import (
    ANNOUNCE,
    CONV_WEIGHT_GRADIENT,
    HAND_OUT,
    JOIN,
    PRODUCT,
    STAYS,
)

MOST_KEPT_BYTES = 256 << 20
"""Memory that waits to be freed, until both streams are joined in between."""
LEAST_ANNOUNCED_BYTES = 1 << 20
"""Size from which a gradient's readiness is reported: sending as much takes about 20 us between H200s."""
HANDED_BYTES = 4 << 20
"""Gradients that are converted are handed out together from this size on; one that is larger leaves alone.
Source: on an H200 21 conversions of ResNet-18's one by one took 105 us, its whole step 1,045."""

_aten = torch.ops.aten
_CONV = _aten.convolution_backward.default
_CONVERT = torch.ops.prims.convert_element_type.default


def _conv_flops(gradient: Tensor, x: Tensor, weight: Tensor) -> float:
    """Two for each weight and place; a stride or a missing border leaves fewer places on one side."""
    places = min(gradient.numel() // gradient.shape[1], x.numel() // x.shape[1])
    return 2.0 * places * weight.numel()


def _product_flops(left: Tensor, right: Tensor) -> float:
    return 2.0 * left.numel() * right.shape[1]


_FLOPS: dict[Any, Callable[..., float]] = {_CONV: _conv_flops, _aten.mm.default: _product_flops}
"""What fills the GPU, if anything does; and the operators that may move are among these."""
_FREE = {
    _aten.permute.default, _aten.view.default, _aten.reshape.default, _aten.t.default,
    _aten.transpose.int, _aten.unsqueeze.default, _aten.squeeze.dim,
    _CONVERT,
}  # fmt: skip
"""Operators on a gradient's way out that may as well be done after the join."""


class GradientsBeside(CustomGraphPass):
    """For the compiler's option `post_grad_custom_post_pass`.

    Args:
        announces: Gradients are to leave as soon as they are ready, see `announce`.
    """

    def __init__(self, *, announces: bool = False) -> None:
        self._announces = announces

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph in place; its results stay the same bit for bit."""
        put_beside(graph, converts=self._announces)
        if self._announces:
            announce(graph)

    def uuid(self) -> Any:
        """Names this version of the pass in the compiler's cache."""
        files = get_hash_for_files((__file__, operators.__file__, split_backward_module.__file__))
        return files, self._announces


def put_beside(
    graph: fx.Graph, devices: tuple[str, ...] = ("cuda",), *, converts: bool = False
) -> int:
    """Move weight gradients that nothing waits for to the side stream, in place.

    Args:
        graph: A graph after the compiler's own passes, with values without data in its nodes.
        devices: Kinds of devices whose operators are moved.
        converts: Bring gradients that leave in another dtype into it there, several at a time, rather than
            all together at the end: then they are ready there.

    Returns:
        The number of operators that were moved; none if fewer than two could be.
    """
    # First: a convolution's backward that gives both gradients at once cannot leave the chain.
    split_backward(graph, devices=devices)
    order = {node: index for index, node in enumerate(graph.nodes)}
    heavy = [node for node in graph.nodes if node.target in _FLOPS]
    # Where the chain ends: what is read earlier than that would have the chain wait for the side stream.
    tail = order[heavy[-1]] if heavy else 0
    ways = {node: _way_out(node) for node in heavy if _may_move(node, devices)}
    moved = {
        node: way
        for node, way in ways.items()
        if all(order[reader] > tail for reader in way.readers)
    }
    places = {_values(node)[0].device for node in moved}
    if len(moved) < 2 or len(places) > 1:  # one side stream, one join
        return 0
    end = min((reader for way in moved.values() for reader in way.readers), key=order.__getitem__)
    program = _fingerprint(graph)
    beside = _Beside(graph, program)
    for node in moved:
        # A join in the middle costs overlap, but inputs that nobody may free would grow with the depth of the
        # model.
        if beside.kept_bytes > MOST_KEPT_BYTES:
            beside.join(node)
        beside.put(node, converts=converts)
    beside.join(end)
    # Steps may be gone by now: conversions were replaced by what hands results out.
    left = set(graph.nodes)
    for step in sorted(
        {step for way in moved.values() for step in way.steps} & left, key=order.__getitem__
    ):
        end.prepend(step)
    graph.lint()
    return len(moved)


class _Beside:
    """What was put beside since the last join."""

    def __init__(self, graph: fx.Graph, program: int) -> None:
        self._graph, self._program = graph, program
        self._made: list[fx.Node] = []
        self._handed: list[fx.Node] = []
        self._conversions: list[fx.Node] = []

    @property
    def kept_bytes(self) -> int:
        """What cannot be freed before the next join."""
        return sum(_num_bytes(x.meta["val"]) for x in _read_by(self._made))

    def put(self, node: fx.Node, *, converts: bool) -> None:
        new = _put_beside(self._graph, node, self._program)
        self._made.append(new)
        conversion = _conversion(new) if converts else None
        if conversion is None:
            return
        new.args = (*new.args[:-1], STAYS)
        # One call converts to one dtype.
        if self._conversions and self._conversions[0].args[1] is not conversion.args[1]:
            self._hand_out()
        self._conversions.append(conversion)
        if sum(_num_bytes(one.meta["val"]) for one in self._conversions) >= HANDED_BYTES:
            self._hand_out()

    def join(self, before: fx.Node) -> None:
        """Make the chain wait for all of it."""
        self._hand_out()
        results, kept = [*self._made, *self._handed], [*_read_by(self._made)]
        with self._graph.inserting_before(before):
            self._graph.call_function(JOIN, (results, kept))
        self._made.clear()
        self._handed.clear()

    def _hand_out(self) -> None:
        if self._conversions:
            self._handed += _hand_out(self._graph, self._conversions, self._program, is_beside=True)
        self._conversions = []


class _Way(NamedTuple):
    """From a result to those who need it: operators that only pass it on, and the first that do not."""

    steps: tuple[fx.Node, ...]
    readers: tuple[fx.Node, ...]


def _way_out(node: fx.Node) -> _Way:
    steps: list[fx.Node] = []
    readers: list[fx.Node] = []
    pending = list(node.users)
    for user in pending:
        if user.target is operator.getitem:  # the only one: it stays with the operator
            pending.extend(user.users)
        elif user.target in _FREE:
            steps.append(user)
            pending.extend(user.users)
        else:
            readers.append(user)
    return _Way(tuple(steps), tuple(readers))


def _may_move(node: fx.Node, devices: tuple[str, ...]) -> bool:
    """Whether there is an operator of ours for it, and it leaves room for others."""
    if node.target is _CONV and not _is_weight_only(node):
        return False
    inputs = _values(node)
    if not all(isinstance(x, Tensor) and x.device.type in devices for x in inputs):
        return False
    if not all(isinstance(size, int) for x in inputs for size in x.shape):
        return False  # a size that is not known yet says nothing about room
    return (
        _FLOPS[node.target](*inputs) <= BESIDE_FLOPS
        and sum(map(_num_bytes, inputs)) <= BESIDE_BYTES
    )


def _values(node: fx.Node) -> list[Any]:
    return [x.meta.get("val") for x in node.args[:3] if isinstance(x, fx.Node)]


def _is_weight_only(node: fx.Node) -> bool:
    """Whether a convolution's backward gives the gradient of the weight, and that is used."""
    mask: Any = node.args[10]
    return list(mask) == [False, True, False] and len(node.users) == 1


def _put_beside(graph: fx.Graph, node: fx.Node, program: int) -> fx.Node:
    """Replace an operator by ours; the new node gives the tensor itself."""
    with graph.inserting_before(node):
        if node.target is not _CONV:
            new = graph.call_function(PRODUCT, (*node.args, program))
            result = node
        else:
            gradient, x, weight, _bias_sizes, *settings, _mask = node.args
            (result,) = node.users
            # The layout that the graph promised: another one the compiler would bring into it by reading
            # before the join.
            strides = list(result.meta["val"].stride())
            new = graph.call_function(
                CONV_WEIGHT_GRADIENT, (gradient, x, weight, *settings, strides, program)
            )
    new.meta.update(result.meta)
    result.replace_all_uses_with(new)
    graph.erase_node(result)
    if result is not node:
        graph.erase_node(node)
    return new


def _fingerprint(graph: fx.Graph) -> int:
    """A number of this program, other than that of the same step with other shapes for example."""
    # With shapes: addresses that were noted for one program must not serve that of another batch size.
    lines = [f"{node.name} {node.target} {node.meta.get('val')}" for node in graph.nodes]
    return zlib.crc32("\n".join(lines).encode())


def _conversion(node: fx.Node) -> fx.Node | None:
    """What brings a result into the dtype in which it leaves the graph, where that is all it is for."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    is_last = user.target is _CONVERT and all(reader.op == "output" for reader in user.users)
    return user if is_last else None


def _hand_out(
    graph: fx.Graph, conversions: Sequence[fx.Node], program: int, *, is_beside: bool
) -> list[fx.Node]:
    """Have some conversions made at once, right after the last of what they convert; the new results."""
    sources = [conversion.all_input_nodes[0] for conversion in conversions]
    dtype = conversions[0].args[1]
    with graph.inserting_after(sources[-1]):
        handed = graph.call_function(HAND_OUT, (sources, dtype, program, is_beside))
    handed.meta["val"] = [conversion.meta["val"] for conversion in conversions]
    results = []
    # Reversed, as each is inserted right behind `handed`: so they stand in their own order.
    for place, conversion in reversed([*enumerate(conversions)]):
        with graph.inserting_after(handed):
            result = graph.call_function(operator.getitem, (handed, place))
        result.meta.update(conversion.meta)
        conversion.replace_all_uses_with(result)
        graph.erase_node(conversion)
        results.append(result)
    return results


def announce(graph: fx.Graph, devices: tuple[str, ...] = ("cuda",)) -> int:
    """Let a backward graph say when its large results are ready, in place.

    Results made beside are reported by themselves. Small ones are not worth it: they are computed together,
    and sent together.

    Args:
        graph: A graph as `put_beside` leaves it.
        devices: Kinds of devices whose results are announced.

    Returns:
        The number of results that the graph now announces.
    """
    if not any("tangents" in node.name for node in graph.nodes if node.op == "placeholder"):
        return 0  # a forward graph, whose results stay here
    (end,) = (node for node in graph.nodes if node.op == "output")
    found = [
        node
        for node in end.all_input_nodes
        if node.op == "call_function"
        and node.target not in (CONV_WEIGHT_GRADIENT, PRODUCT)
        and not _is_handed(node)
        and isinstance(node.meta.get("val"), Tensor)
        and node.meta["val"].device.type in devices
        and _num_bytes(node.meta["val"]) >= LEAST_ANNOUNCED_BYTES
    ]
    program = _fingerprint(graph)
    for node in found:
        if node.target is _CONVERT and all(user is end for user in node.users):
            _hand_out(graph, [node], program, is_beside=False)
        else:
            with graph.inserting_after(node):
                graph.call_function(ANNOUNCE, (node,))
    graph.lint()
    return len(found)


def _is_handed(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is HAND_OUT


def _read_by(nodes: Iterable[fx.Node]) -> dict[fx.Node, None]:
    return dict.fromkeys(x for node in nodes for x in node.args[:3] if isinstance(x, fx.Node))


def _num_bytes(value: Tensor) -> int:
    return value.numel() * value.element_size()
