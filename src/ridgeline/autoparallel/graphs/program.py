"""A traced function as a program: operations in issue order, their dependencies, and how to run them."""

import copy
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.aliasing import Accesses, must_stay, writes
from ridgeline.autoparallel.graphs.dag import Dag, descendants
from ridgeline.autoparallel.graphs.operations import Operation, depend, group
from ridgeline.autoparallel.graphs.segments import (
    Environment,
    Segment,
    SegmentSource,
    compile_segment,
)
from ridgeline.capture.flat_program import FlatProgram, flatten_program
from ridgeline.capture.split_backward import split_backward
from ridgeline.errors import CaptureError
from ridgeline.tensors.nests import builder


def trace_program(fn: Callable[..., Any], example_inputs: Any) -> "Program":
    """Trace a function or module for inputs like these, with the gradients that it computes itself.

    Nothing runs. Gradients that the function takes by `torch.autograd.grad`, or by `.backward()` into
    parameters whose `.grad` is None, are operations like the others. Tensors may be on several devices.

    `example_inputs` are a tuple of positional arguments (nests of tensors), or the only argument.

    Raises:
        CaptureError: it depends on the values of tensors, writes into an argument, an input or output is no
            tensor, or an optimizer steps in it.
    """
    # A hook and no check afterwards: the trace of a step already changes the optimizer's state.
    hook = register_optimizer_step_pre_hook(_refuse_optimizer)
    try:
        return Program(flatten_program(fn, example_inputs, gradients=True, one_device=False))
    finally:
        hook.remove()


class Program:
    """A traced function; `trace_program` makes it.

    The *slot* of a value is the position of its node in `graph.graph.nodes`; the values of one call are an
    `Environment`, a list with an entry a slot. To run it: `bind` the arguments, call segments that together
    hold all operations, in an order that `dag` allows, take the `results`; all under `torch.no_grad()`.

    Args:
        flat: The traced function; its graph is tidied in place.

    Attributes:
        graph: The graph; its first nodes are the state, then the inputs.
        operations: What computes, in issue order; operation `i` is node `i` of `dag`.
        dag: Who must wait for whom: for values, for memory written in place, and for random numbers.
        edge_values: Edge to the slots of the values that it carries; those that only order carry none.
        edge_bytes: Edge to the bytes of these values.
        in_place: Operations that touch memory which some operation writes in place: bound to their device.
        state: The tensors that the function uses besides its inputs, by name; the very tensors.
        inputs: The tensors of the example inputs, as copies.
        sources: Slots of state and inputs, in this order.
        outputs: Slots of the tensors of the result, in order.
        accesses: The memory behind every value of the graph.
        grads: Names of the state whose `.grad` the function sets; it was None before.
        is_differentiable: Whether the results of the function (not those of the program) have gradients.
    """

    def __init__(self, flat: FlatProgram) -> None:
        graph = flat.graph.graph
        # Before slots are numbered and memory is looked at: both go by the nodes that are left.
        tidy(graph)
        split_backward(graph)
        flat.graph.recompile()
        self.graph: fx.GraphModule = flat.graph
        self.state = flat.state
        self.inputs = tuple(flat.inputs)
        self.grads = flat.grads
        self.is_differentiable = flat.is_differentiable
        self._input_tree, self._output_tree = flat.input_tree, flat.output_tree
        self._build = builder(flat.output_tree)
        self._constants = flat.constants
        self._num_results = len(flat.outputs)
        self.slot_of = {node: slot for slot, node in enumerate(graph.nodes)}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self.sources = tuple(self.slot_of[node] for node in placeholders)
        self._attributes = {
            self.slot_of[node]: _attribute(self.graph, node)
            for node in graph.nodes
            if node.op == "get_attr"
        }
        # State comes first among the placeholders; the inputs behind it are examples, and share no memory.
        real = dict(zip(placeholders, self.state.values(), strict=False))
        accesses = Accesses(graph, real)
        grouping = group(graph, accesses, self.slot_of)
        self.operations: tuple[Operation, ...] = grouping.operations
        self._late_views = grouping.late_views
        dependencies = depend(self.operations, accesses, self.slot_of)
        self.dag: Dag = dependencies.dag
        self.edge_values = dependencies.edge_values
        self.edge_bytes = dependencies.edge_bytes
        self.in_place = dependencies.in_place
        self._written_memory = dependencies.written_memory
        self._memory_users = dependencies.memory_users
        self.accesses = accesses
        ends = pytree.tree_leaves(graph.output_node().args)
        if any(not isinstance(end, fx.Node) for end in ends):
            raise CaptureError(
                f"wanted results that are tensors, got {ends}; return the tensors that the function computes"
            )
        self.outputs = tuple(self.slot_of[node] for node in ends)
        # Then arguments are their own leaves, and a call need not flatten them.
        self._is_flat = self._input_tree == pytree.tree_structure(tuple(self.inputs))
        self._sets_grads = True
        self._is_single = self._output_tree.is_leaf() and len(self.outputs) == 1
        self._finish = compile_segment(
            SegmentSource(self._late_views, self.slot_of, frozenset(self.outputs), frozenset()),
            "results",
        )

    @property
    def returns_views(self) -> bool:
        """Whether a result is a view of an input or of state."""
        return bool(self._late_views)

    def run(self, *args: Any) -> Any:
        """The result for these arguments, operation by operation in this thread."""
        environment = self.bind(*args)
        with torch.no_grad():
            self._serial(environment)
            return self.results(environment)

    def bind(self, *args: Any) -> Environment:
        """A fresh environment with the state and the tensors of the arguments in their slots.

        The arguments must have the structure, shapes, dtypes and devices of the example.
        """
        environment: Environment = [None] * len(self.slot_of)
        leaves = args if self._is_flat else pytree.tree_leaves(args)
        values = (*self.state.values(), *leaves)
        for slot, value in zip(self.sources, values, strict=True):
            environment[slot] = value
        for slot, value in self._attributes.items():
            environment[slot] = value
        return environment

    def results(self, environment: Environment) -> Any:
        """What the function returns, from the slots of its outputs; sets the gradients that it sets."""
        if self._late_views:
            self._finish(environment)
        if self._is_single and self._sets_grads:
            return environment[self.outputs[0]]
        tensors = [environment[slot] for slot in self.outputs]
        grads = tensors[self._num_results :]
        result = self.rebuild(tensors)
        if not self._sets_grads:
            return result, grads
        self.set_grads(grads)
        return result

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """The structure that the function returns, from its tensors; the rest is constant."""
        remaining = iter(tensors)
        num_leaves = self._num_results + len(self._constants)
        leaves = [
            self._constants[leaf] if leaf in self._constants else next(remaining)
            for leaf in range(num_leaves)
        ]
        return self._build(leaves)

    def segment(
        self,
        operations: Sequence[int],
        *,
        keep: Collection[int] = (),
        device: torch.device | None = None,
    ) -> Segment:
        """These operations as one compiled function `segment(environment)`, run in this order.

        Values that nothing outside reads never enter the environment, unless they are in `keep`. A slot is
        emptied by the segment that uses it last, where one is last in every order, unless it is in `keep`.

        `operations` are in an order that `dag` allows. Operators that made tensors where they were traced
        make them on `device`.
        """
        inside = set(operations)
        nodes = dict.fromkeys(
            node for index in operations for node in self.operations[index].members
        )
        made = {slot for index in operations for slot in self.operations[index].makes}
        last = self.last_use
        kept = {*keep, *self.outputs}
        emptied = {
            slot
            for index in operations
            for slot in self.operations[index].reads
            if slot not in kept
            and slot in last
            # With several last readers on different lanes nobody knows which comes last; it goes with the
            # environment.
            and len(last[slot]) == 1
            and last[slot][0] in inside
        }
        exported = {slot for slot in made if slot in kept or self.users.get(slot, set()) - inside}
        # All operations of a segment were traced on one device: whoever makes one splits by it.
        home = self.operations[operations[0]].device if operations else None
        text = SegmentSource(
            tuple(nodes), self.slot_of, frozenset(exported), frozenset(emptied), device, home
        )
        return compile_segment(text, f"segment of {len(operations)} operations")

    @cached_property
    def users(self) -> dict[int, set[int]]:
        """Slot of a computed value to the operations that read it."""
        found: dict[int, set[int]] = {}
        for index, operation in enumerate(self.operations):
            for slot in operation.reads:
                found.setdefault(slot, set()).add(index)
        return found

    @cached_property
    def last_use(self) -> dict[int, tuple[int, ...]]:
        """Slot of a computed value to its last readers: those after which no other reader must come.

        Where there is one it is the last in every order that `dag` allows. Outputs are used after the end,
        and have no entry; nor have state and inputs.
        """
        after = descendants(self.dag)
        fixed = {*self.sources, *self.outputs, *self._attributes, *self._late_reads()}
        found: dict[int, tuple[int, ...]] = {}
        for slot, users in self.users.items():
            if slot not in fixed:
                mask = sum(1 << user for user in users)
                found[slot] = tuple(sorted(user for user in users if not after[user] & mask))
        return found

    def written_storages(self) -> frozenset[int]:
        """Addresses of the storages of state that is written in place."""
        return frozenset(
            tensor.untyped_storage().data_ptr()
            for node, tensor in zip(self.graph.graph.nodes, self.state.values(), strict=False)
            if self.accesses.of(node) & self._written_memory
        )

    def returning_grads(self) -> "Program":
        """The same program, whose results are (result, gradients) instead of setting `.grad`."""
        # A shallow copy: operations, edges and compiled segments are the same, only the end of a call
        # differs.
        other = copy.copy(self)
        other._sets_grads = False  # noqa: SLF001 - a copy of this one
        return other

    def set_grads(self, grads: Sequence[Tensor]) -> None:
        """Set `.grad` of the state whose gradients the function sets."""
        for name, grad in zip(self.grads, grads, strict=True):
            self.state[name].grad = grad

    def crosses(self, lane_of: Sequence[int]) -> frozenset[int]:
        """Slots whose memory is touched on another lane than that of the operation that fills them.

        On streams they must be kept until the lanes have joined: the allocator knows nothing of the others.
        """
        found: set[int] = set()
        for index, operation in enumerate(self.operations):
            for node in operation.members:
                slot = self.slot_of[node]
                if slot not in operation.makes:
                    continue
                users = [
                    user
                    for memory in self.accesses.of(node)
                    for user in self._memory_users.get(memory, ())
                ]
                if any(lane_of[user] != lane_of[index] for user in users):
                    found.add(slot)
        return frozenset(found)

    @cached_property
    def _serial(self) -> Segment:
        return self.segment(range(len(self.operations)))

    def _late_reads(self) -> set[int]:
        return {self.slot_of[value] for view in self._late_views for value in view.all_input_nodes}

    def __repr__(self) -> str:
        return (
            f"Program({len(self.operations)} operations, {len(self.dag.edges)} edges, "
            f"{len(self.state)} tensors of state, {len(self.inputs)} inputs)"
        )


def _refuse_optimizer(optimizer: Any, *_: Any) -> None:
    """Its learning rate and the like are Python numbers, which a program would hold as they were."""
    raise CaptureError(
        f"wanted a function without an optimizer, got a step of {type(optimizer).__name__}; let it step "
        "after the call, or use rl.TrainStep, which keeps learning rates as tensors"
    )


def _attribute(module: fx.GraphModule, node: fx.Node) -> Tensor:
    value: Any = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value


_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""`torch.tensor([1.0, 2.0])` in a function: a copy of a constant, which is only needed to write into it."""


def tidy(graph: fx.Graph) -> None:
    """Drop what is not needed, and detach nodes: a program runs without gradients."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.detach.default:
            (value,) = node.all_input_nodes
            is_returned = any(user.op == "output" for user in node.users)
            # A detached input that is returned has to stay another tensor than the input.
            if value.op == "call_function" or not is_returned:
                node.replace_all_uses_with(value)
                graph.erase_node(node)
        elif node.target in _LIFTS and all(_only_reads(user) for user in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    # Random operators stay though nobody reads them: the generator has to move on as it does in the function.
    graph.eliminate_dead_code(is_impure_node=must_stay)


def _only_reads(node: fx.Node) -> bool:
    """Whether a node makes something new of its arguments: it neither writes nor hands them on."""
    if not isinstance(node.target, OpOverload) or writes(node):
        return False
    return all(result.alias_info is None for result in node.target._schema.returns)  # noqa: SLF001
