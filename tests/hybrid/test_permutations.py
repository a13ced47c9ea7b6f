"""Steps that take rows in a random order (mixup) are compiled, and draw what plain PyTorch draws."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from ridgeline.plan import Plan
from ridgeline.programs.draws import kept_apart, narrow_permutations
from ridgeline.runtime.steps.step import PlannedStep

STEPS = 4


def mixup(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    order = torch.randperm(len(x))
    share = torch.rand(())
    one, other = (x + 0.1 * torch.randn_like(x) for _ in range(2))  # with noise of its own for each
    scores = model(share * one + (1.0 - share) * other[order])
    return share * F.cross_entropy(scores, y) + (1.0 - share) * F.cross_entropy(scores, y[order])


def batch_of(index: int, size: int) -> Any:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 3, (size,), generator=generator)


def losses(execution: Any, sizes: Sequence[int] = (8,) * STEPS) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with PlannedStep(model, mixup, optimizer, Plan(execution=execution)) as step:
        return [float(step(batch_of(index, size))) for index, size in enumerate(sizes)]


def narrowed(function: Any, *inputs: Any) -> fx.GraphModule:
    graph = make_fx(function)(*inputs)
    narrow_permutations(graph)
    return graph


def test_draws_that_look_alike_stay_apart() -> None:
    """Torch's compiler makes one of some of them; of what draws nothing it may."""

    def noise(x: Tensor) -> Tensor:
        drawn = [torch.randn_like(x) + aten.uniform(x) + aten.exponential(x) for _ in range(2)]
        return drawn[0] * x.exp() - drawn[1] * x.exp()

    aten = torch.ops.aten
    graph = make_fx(noise)(torch.ones(3)).graph
    with kept_apart():
        found = [node.target for node in fx_graph_cse(graph).nodes]
    drawing = (aten.randn_like.default, aten.uniform.default, aten.exponential.default)
    assert [found.count(operator) for operator in drawing] == [2, 2, 2]
    assert found.count(aten.exp.default) == 1


@pytest.mark.parametrize("execution", ["compiled", "step-graph", "packaged"])
def test_mixup_is_compiled(execution: Any) -> None:
    """Torch's compiler itself fails on this loss; losses are those of the step as written."""
    assert losses(execution) == pytest.approx(losses("eager"), rel=1e-5)


def test_batches_of_any_size() -> None:
    """A program that is compiled for any size draws permutations of that size."""
    sizes = (8, 8, 5, 7, 3, 8)
    assert losses("compiled", sizes) == pytest.approx(losses("eager", sizes), rel=1e-5)


@given(st.integers(0, 3000), st.integers(0, 1 << 30))
def test_permutations_are_the_same(length: int, seed: int) -> None:
    """In 32 bits the same permutation is drawn, the generator moves as far, and the type stays."""

    def draw(x: Tensor) -> Tensor:
        return torch.randperm(length) + x

    graph = narrowed(draw, torch.zeros((), dtype=torch.int64))
    torch.manual_seed(seed)
    wanted, state = draw(torch.zeros((), dtype=torch.int64)), torch.get_rng_state()
    torch.manual_seed(seed)
    got = graph(torch.zeros((), dtype=torch.int64))
    assert got.dtype == torch.int64
    assert torch.equal(got, wanted)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_each_value_is_stays_known() -> None:
    """The graph says 32 bits of what is drawn, and 64 of what is used, as passes after it read."""

    def draw(x: Tensor) -> Tensor:
        return x[torch.randperm(4)]

    graph = make_fx(draw, tracing_mode="fake")(torch.ones(4))
    narrow_permutations(graph)
    (drawn,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.randperm.default)
    (used,) = drawn.users
    assert drawn.meta["val"].dtype == torch.int32
    assert used.meta["val"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.float32])
def test_other_types_stay(dtype: torch.dtype) -> None:
    """A permutation of a type of the user's own is left as it is."""
    graph = make_fx(lambda x: torch.randperm(5, dtype=dtype) + x)(torch.zeros((), dtype=dtype))
    before = graph.code
    narrow_permutations(graph)
    assert graph.code == before


def test_done_twice_it_changes_nothing_more() -> None:
    """A graph that was changed is compiled again with other options."""
    graph = narrowed(lambda x: x[torch.randperm(4)], torch.ones(4))
    before = graph.code
    narrow_permutations(graph)
    assert graph.code == before
