"""Traced programs: what they compute, what they depend on, and how their segments use the environment."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.dag import descendants
from ridgeline.autoparallel.graphs.program import Program, trace_program
from ridgeline.errors import CaptureError


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64, 2),
    )


def training_step(net: nn.Module) -> Callable[[Tensor], Any]:
    parameters = list(net.parameters())

    def step(x: Tensor) -> Any:
        loss = net(x).square().mean()
        grads = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.sub_(grad, alpha=0.1)
        return {"loss": loss, "grads": grads, "none": None, "weight": parameters[-2].t()}

    return step


def backward_step(net: nn.Module) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss

    return step


def assert_same(got: Any, wanted: Any) -> None:
    mine, structure = pytree.tree_flatten(got)
    theirs, other = pytree.tree_flatten(wanted)
    assert structure == other
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def run_in_order(program: Program, order: list[int], *args: Any) -> Any:
    """One segment an operation, in an order of one's own."""
    environment = program.bind(*args)
    with torch.no_grad():
        for index in order:
            program.segment([index])(environment)
        return program.results(environment)


# What a program computes.


def test_a_program_gives_what_the_function_gives() -> None:
    """Results, updates of parameters and buffers, and random numbers are those of the function, exactly."""
    net, twin = network(), network()
    x = torch.randn(2, 3, 6, 6)
    program = trace_program(training_step(net), x)
    for seed in range(3):
        torch.manual_seed(seed)
        got = program.run(x + seed)
        torch.manual_seed(seed)
        assert_same(got, training_step(twin)(x + seed))
    assert_same(net.state_dict(), twin.state_dict())


def test_tracing_changes_nothing() -> None:
    """Tracing draws no random numbers, updates no state and leaves no gradients."""
    net = network()
    before, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    trace_program(training_step(net), torch.randn(2, 3, 6, 6, generator=torch.Generator()))
    trace_program(backward_step(net), torch.randn(2, 3, 6, 6, generator=torch.Generator()))
    assert_same(net.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(parameter.grad is None for parameter in net.parameters())


def test_backward_sets_gradients() -> None:
    """`.backward()` in a function becomes operations, and the program sets `.grad` as the function does."""
    net, twin = network().eval(), network().eval()
    x = torch.randn(2, 3, 6, 6)
    program = trace_program(backward_step(net), x)
    assert_same(program.run(x), backward_step(twin)(x).detach())
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert len(program.grads) == 6


def test_gradients_can_be_returned_instead() -> None:
    """For a captured graph the gradients are results, and setting them is a step of its own."""
    net = network().eval()
    x = torch.randn(2, 3, 6, 6)
    program = trace_program(backward_step(net), x)
    _, grads = program.returning_grads().run(x)
    assert all(parameter.grad is None for parameter in net.parameters())
    program.set_grads(grads)
    assert [parameter.grad for parameter in net.parameters()] == list(grads)


@pytest.mark.parametrize(
    ("make", "is_differentiable"),
    [(lambda net: net, True), (training_step, False), (backward_step, False)],
    ids=["forward", "autograd.grad", "backward"],
)
def test_what_backward_needs_is_known(
    make: Callable[[nn.Module], Callable[..., Any]], is_differentiable: bool
) -> None:
    """Results can be differentiated further unless the function went backward itself."""
    program = trace_program(make(network()), torch.randn(2, 3, 6, 6))
    assert program.is_differentiable is is_differentiable


def test_gradients_of_inputs_are_refused() -> None:
    """A function that sets `.grad` of an argument is told to return it."""
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(CaptureError) as caught:
        trace_program(lambda x: (x * 2).sum().backward(), x)
    assert str(caught.value) == (
        "wanted a function that leaves its inputs as they are, got one that sets .grad of input 0; return the "
        "gradient of torch.autograd.grad instead"
    )


def test_state_is_read_by_reference() -> None:
    """An update in place of a tensor that the function closes over is seen by the next call."""
    scale = torch.tensor(2.0)
    program = trace_program(lambda x: x * scale, torch.ones(2))
    scale.fill_(5.0)
    assert program.run(torch.ones(2)).tolist() == [5.0, 5.0]
    assert list(program.state.values()) == [scale]


def test_constants_cost_no_operation() -> None:
    """A tensor made from numbers inside the function is a constant, not a copy in every call."""
    program = trace_program(lambda x: x * torch.tensor([1.0, 2.0]), torch.ones(2))
    assert len(program.operations) == 1
    assert program.run(torch.ones(2)).tolist() == [1.0, 2.0]


# What it depends on.


def chains(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x, y = x.sin(), y.cos()
    return x + y


def test_edges_follow_values() -> None:
    """Two chains that meet are two paths; each edge knows the values and bytes that it carries."""
    program = trace_program(chains, (torch.randn(4), torch.randn(4)))
    assert program.dag.edges == ((0, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 6))
    assert set(program.edge_bytes.values()) == {16}
    for u, v in program.dag.edges:
        (slot,) = program.edge_values[u, v]
        assert slot in program.operations[u].makes
        assert slot in program.operations[v].reads


def test_views_belong_to_operations() -> None:
    """Views and items are no nodes: those of a result go with its maker, those of an input with its readers."""
    weight = torch.randn(4, 6)

    def fn(x: Tensor) -> Tensor:
        a, b = (x @ weight.t().contiguous().t().t()).view(-1).chunk(2)
        return a * 2 + b * weight.flatten()[0]

    program = trace_program(fn, torch.randn(2, 6))
    names = [node.name for node in _nodes(program)]
    assert not any(word in name for name in names for word in ("view", "getitem", "split", "t_"))
    x = torch.randn(2, 6)
    assert torch.equal(program.run(x), fn(x))


def test_writes_wait_for_readers_and_readers_for_writes() -> None:
    """An update in place comes after all earlier readers of the memory, also through views, before all later ones."""
    buffer = torch.zeros(4)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        before = buffer[:2] * 2
        buffer.add_(x)
        return before, buffer.view(2, 2) * 3

    program = trace_program(fn, torch.ones(4))
    assert program.dag.edges == ((0, 1), (1, 2))
    assert program.edge_bytes[0, 1] == 0
    assert program.in_place == {0, 1, 2}
    assert program.written_storages() == {buffer.untyped_storage().data_ptr()}


def test_statistics_of_batch_norm_are_written() -> None:
    """Batch norm in training mode writes its statistics although its schema says nothing of it."""
    net = nn.BatchNorm1d(3)

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        first = net(x)
        return first, net(x * 2)

    program = trace_program(fn, torch.randn(4, 3))
    norms = [i for i, node in enumerate(_nodes(program)) if "batch_norm" in node.name]
    assert len(norms) == 2
    assert tuple(norms) in program.dag.edges
    program = trace_program(net.eval(), torch.randn(4, 3))
    assert not program.in_place


def test_random_operators_stay_in_order() -> None:
    """Operators that draw from one generator are a chain, so the numbers are those of the function."""

    def fn(x: Tensor) -> Tensor:
        return F.dropout(x) + F.dropout(x * 2) + torch.rand_like(x)

    program = trace_program(fn, torch.randn(64))
    random = [
        i
        for i, node in enumerate(_nodes(program))
        if "bernoulli" in node.name or "rand" in node.name
    ]
    after = descendants(program.dag)
    assert len(random) == 3
    assert all(after[a] >> b & 1 for a, b in itertools.pairwise(random))


@pytest.fixture(scope="module")
def traced() -> tuple[nn.Module, Program]:
    net = network()
    return net, trace_program(training_step(net), torch.randn(2, 3, 6, 6))


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_every_order_that_the_dag_allows_is_right(
    traced: tuple[nn.Module, Program], random: Any
) -> None:
    """A training step gives the same results and state in any order that the edges allow."""
    net, program = traced
    twin = network()
    net.load_state_dict(twin.state_dict())
    x = torch.randn(2, 3, 6, 6)
    left = [len(before) for before in program.dag.parents()]
    children = program.dag.children()
    ready = [index for index, count in enumerate(left) if not count]
    order: list[int] = []
    while ready:
        index = ready.pop(random.randrange(len(ready)))
        order.append(index)
        for child in children[index]:
            left[child] -= 1
            if not left[child]:
                ready.append(child)
    torch.manual_seed(1)
    got = run_in_order(program, order, x)
    torch.manual_seed(1)
    assert_same(got, training_step(twin)(x))
    assert_same(net.state_dict(), twin.state_dict())


# Segments and slots.


def test_segments_export_what_others_read_and_empty_what_nobody_does() -> None:
    """A value enters the environment only if it is read outside, and leaves it with its last reader."""
    program = trace_program(chains, (torch.randn(4), torch.randn(4)))
    environment = program.bind(torch.randn(4), torch.randn(4))
    filled = [value is not None for value in environment]
    program.segment([0, 2])(environment)
    (slot,) = program.operations[2].makes
    assert [i for i, v in enumerate(environment) if v is not None and not filled[i]] == [slot]
    program.segment([4])(environment)
    assert environment[slot] is None
    assert program.last_use[slot] == (4,)


def test_kept_slots_stay() -> None:
    """Slots in `keep` are filled and not emptied."""
    program = trace_program(chains, (torch.randn(4), torch.randn(4)))
    environment = program.bind(torch.randn(4), torch.randn(4))
    kept = {*program.operations[0].makes, *program.operations[2].makes}
    program.segment([0, 2], keep=kept)(environment)
    program.segment([4], keep=kept)(environment)
    assert all(environment[slot] is not None for slot in kept)


def test_memory_that_crosses_lanes_is_known() -> None:
    """A slot crosses when its memory is used on another lane, if only through a view of it."""
    program = trace_program(lambda x: x.sin().view(2, 2).cos() + x.view(2, 2).sin(), torch.randn(4))
    assert program.crosses([0] * len(program.operations)) == frozenset()
    lane_of = [0, 1, *([0] * (len(program.operations) - 2))]
    names = {node.name: slot for node, slot in program.slot_of.items()}
    assert program.crosses(lane_of) >= {names["sin"], names["view"]}


def test_operators_can_make_tensors_elsewhere() -> None:
    """A segment for another device makes new tensors there."""
    program = trace_program(lambda x: x + torch.zeros(2), torch.ones(2))
    environment = program.bind(torch.ones(2))
    zeros = next(i for i, node in enumerate(_nodes(program)) if "zeros" in node.name)
    program.segment([zeros], device=torch.device("meta"))(environment)
    (slot,) = program.operations[zeros].makes
    assert environment[slot].device.type == "meta"


def _nodes(program: Program) -> list[fx.Node]:
    return [operation.node for operation in program.operations]
