"""Masks of dropout in a step's program: the eager step's numbers, from an operator that returns them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from ridgeline.runtime.steps.whole_step.draws.random_order import draw_in_memory_order

aten = torch.ops.aten


def masked(x: Tensor, keep: float) -> Tensor:
    return x * torch.empty_like(x).bernoulli_(keep)


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    keep=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0 - 0.1, 1.0]),
    is_turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_the_numbers_are_those_of_the_step_as_written(shape, keep, is_turned, dtype) -> None:
    x = torch.ones(shape, dtype=dtype)
    x = x.transpose(0, -1) if is_turned else x
    graph = make_fx(lambda x: masked(x, keep), tracing_mode="fake")(x)
    draw_in_memory_order(graph.graph)
    graph.recompile()
    assert aten.bernoulli_.float not in {node.target for node in graph.graph.nodes}
    torch.manual_seed(7)
    wanted, state = masked(x, keep), torch.get_rng_state()
    torch.manual_seed(7)
    assert torch.equal(graph(x), wanted)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_turned", [True, False])
def test_those_that_are_turned_are_counted(is_turned) -> None:
    x = torch.ones(3, 5)
    x = x.t() if is_turned else x
    graph = make_fx(lambda x: masked(x, 0.5), tracing_mode="fake")(x)
    assert draw_in_memory_order(graph.graph) == is_turned


def test_a_mask_may_have_as_many_rows_as_values_decide() -> None:
    """As of edges of a graph, without those from a node to itself."""

    def drawn(x: Tensor) -> Tensor:
        return masked(x[x[:, 0] > 0], 0.5)

    graph = make_fx(drawn, tracing_mode="symbolic")(torch.ones(4, 2))
    draw_in_memory_order(graph.graph)
    graph.recompile()
    x = torch.tensor([[1.0, 2.0], [-1.0, 1.0], [3.0, 4.0]])
    torch.manual_seed(7)
    wanted = drawn(x)
    torch.manual_seed(7)
    assert torch.equal(graph(x), wanted)


def test_a_mask_that_is_drawn_over_values_is_left_alone() -> None:
    graph = make_fx(lambda x: (x + 1).bernoulli_(0.5) * x, tracing_mode="fake")(torch.ones(3))
    assert draw_in_memory_order(graph.graph) == 0
    assert aten.bernoulli_.float in {node.target for node in graph.graph.nodes}
