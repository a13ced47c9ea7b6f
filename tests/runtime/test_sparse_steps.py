"""Graph networks: a step that multiplies by a sparse matrix trains as plain PyTorch does, in graphs and compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from emulated_graphs import emulated_graphs
from ridgeline.capture import unloadable

NODES, STEPS = 12, 10
Change = Callable[["Held"], None]


@pytest.fixture(autouse=True)
def _graphs() -> Iterator[None]:
    with emulated_graphs():
        yield


class Convolution(nn.Module):
    """One layer of the network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.3)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        return torch.spmm(adjacency, features @ self.weight) + self.bias


class Network(nn.Module):
    """Two layers, as in tkipf/pygcn."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Convolution(8, 16), Convolution(16, 4)

    def forward(self, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.first(features, adjacency).relu()
        return nn.functional.log_softmax(self.second(hidden, adjacency), 1)


def adjacency(layout: str, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    dense = (torch.rand(NODES, NODES, generator=random) < 0.3).float() + torch.eye(NODES)
    dense /= dense.sum(1, keepdim=True)
    return dense.to_sparse().coalesce() if layout == "coo" else dense.to_sparse_csr()


class Held:
    """What the loss function of a step holds."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.adjacency = adjacency(layout)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        matrix = batch[2] if len(batch) > 2 else self.adjacency
        return nn.functional.nll_loss(model(batch[0], matrix)[:6], batch[1][:6])


def trained(
    execution: str, layout: str, change: Change | None, *, in_batch: bool
) -> tuple[list[Tensor], dict[str, float], tuple[str, ...]]:
    """Losses and parameters of some steps, counts and notes; half way the matrix changes."""
    torch.manual_seed(0)
    model, held = Network(), Held(layout)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.5)
    batch: tuple[Tensor, ...] = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    results: list[Tensor] = []
    counts: dict[str, float] = {}
    notes: tuple[str, ...] = ()

    def run(step: Callable[[Any], Tensor]) -> None:
        for number in range(STEPS):
            if number == STEPS // 2 and change is not None:
                change(held)
            results.append(step((*batch, held.adjacency) if in_batch else batch).detach().clone())

    if execution == "plain":

        def plain(now: Any) -> Tensor:
            optimizer.zero_grad()
            loss = held.loss(model, now)
            loss.backward()
            optimizer.step()
            return loss

        run(plain)
    else:
        plan = rl.Plan(execution=execution)
        with rl.TrainStep(model, held.loss, optimizer, plan, device="cpu") as step:
            run(step)
            notes = step.notes
            counts = dict(step.timeline().counters)
    return [*results, *(p.detach() for p in model.parameters())], counts, notes


def _double(held: Held) -> None:
    held.adjacency.values().mul_(2.0)


def _replace(held: Held) -> None:
    held.adjacency = adjacency(held.layout, seed=1)


def _write_others(held: Held) -> None:
    if held.layout == "coo":
        held.adjacency.copy_(adjacency("coo", seed=1))
    else:
        held.adjacency.values().copy_(held.adjacency.values().flip(0))


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("change", [None, _double, _replace, _write_others])
@pytest.mark.parametrize("in_batch", [False, True])
def test_graphs(layout: str, change: Change | None, in_batch: bool) -> None:
    """Values that change in place, other elements and other matrices are seen in the step that they come with."""
    expected, _, _ = trained("plain", layout, change, in_batch=in_batch)
    results, counts, notes = trained("graph", layout, change, in_batch=in_batch)
    for mine, other in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    if in_batch:
        assert unloadable.WITH_SPARSE in notes
        assert counts["eager_steps"]
    else:
        assert not counts.get("eager_steps")
        moves = change is _replace or (change is _write_others and layout == "coo")
        assert counts.get("recaptures", 0) == moves


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.parametrize("in_batch", [False, True])
def test_compiled(layout: str, in_batch: bool) -> None:
    """What torch's compiler breaks off at is left to it; the check perturbs values, and no indices."""
    expected, _, _ = trained("plain", layout, _replace, in_batch=in_batch)
    results, _, _ = trained("compiled", layout, _replace, in_batch=in_batch)
    for mine, other in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_a_batch_that_becomes_sparse() -> None:
    """Of the same shape and type: the graph of the dense one is not replayed on it."""
    torch.manual_seed(0)
    model, held = Network(), Held("coo")
    dense = held.adjacency.to_dense()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    batch = torch.randn(NODES, 8), torch.randint(0, 4, (NODES,))
    with rl.TrainStep(
        model, held.loss, optimizer, rl.Plan(execution="graph"), device="cpu"
    ) as step:
        for _ in range(6):
            first = float(step((*batch, dense)))
        assert float(step((*batch, held.adjacency))) == pytest.approx(first)
        assert float(step((*batch, 0.0 * dense))) != pytest.approx(first)
        assert step.timeline().counters["eager_steps"] == 1
