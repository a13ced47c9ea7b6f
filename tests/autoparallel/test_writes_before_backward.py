"""What scripts write between forward and backward: results as they like, and what backward needs not at all."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ridgeline.autoparallel.parallelize import Parallel, parallelize


class Branches(nn.Module):
    """Two branches: one scaled by a buffer, which its backward reads, and one with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.scale + torch.tanh(self.norm(self.second(x)))


@pytest.fixture(scope="module")
def network() -> Branches:
    torch.manual_seed(0)
    return Branches()


@pytest.fixture(scope="module")
def parallel(network: Branches) -> Any:
    with parallelize(network, torch.randn(8, 4), mode="parallel", lanes=2) as made:
        yield made


def gradients(network: Branches, loss: Tensor) -> list[Tensor]:
    network.zero_grad()
    loss.backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


def test_a_result_may_be_changed_in_place(network: Branches, parallel: Parallel) -> None:
    """As that of the function, where its backward does not need it: a loss divided by the steps, say."""
    x, before = torch.randn(8, 4), parallel.report.counters
    found = []
    for run in (network, parallel):
        result = run(x)
        result *= 3
        with torch.no_grad():
            result += 1
        run(x)  # running statistics change, which backward does not read
        found.append(gradients(network, result.square().sum()))
    # But for rounding: a shift before the norm has a gradient of 0.
    assert all(torch.allclose(mine, its, atol=1e-3) for mine, its in zip(*found, strict=True))
    assert parallel.report.counters == before


def test_state_that_backward_reads_is_watched(network: Branches, parallel: Parallel) -> None:
    """Written since forward it would give the gradients of neither: autograd refuses, as for the function."""
    before = parallel.report.counters
    for run in (network, parallel):
        loss = run(torch.randn(8, 4)).sum()
        network.scale += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert parallel.report.counters == before


def test_an_array_in_place_of_a_tensor_is_the_functions_affair(
    network: Branches, parallel: Parallel
) -> None:
    """Calls with it run the function, which may take it, or says what it wants."""
    for run in (network, parallel):
        with pytest.raises(TypeError, match=r"must be Tensor, not numpy\.ndarray"):
            run(np.zeros((8, 4), np.float32))
