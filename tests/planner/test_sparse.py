"""Sparse gradients, which workers do not exchange: no plan of several workers is offered for them."""

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import PlanError
from ridgeline.planner import choose
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload
from strategies import make_machine

REASON = "has a sparse gradient for 0.weight, which workers do not exchange"


def make_load(layer: type[nn.Module], samples: int, *, is_sparse: bool) -> Workload:
    """One step of a table of vectors and a linear layer."""

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(len(x), -1)[:, :16]

    model = nn.Sequential(layer(100, 16, sparse=is_sparse), Last(), nn.Linear(16, 1))
    batch = torch.zeros(samples, 5, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trace(model, lambda model, batch: model(batch).square().mean(), optimizer, batch)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_several_workers_are_left_out_for_sparse_gradients(layer: type[nn.Module]) -> None:
    """One note says why; with dense gradients of the same layer they are in."""
    machine = make_machine(cores=2)
    loads = {n: make_load(layer, 8 // n, is_sparse=True) for n in (1, 2)}
    ranking = choose(machine, loads)
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1}
    assert [note.endswith(REASON) for note in ranking.notes if "left out" in note] == [True]
    dense = {n: make_load(layer, 8 // n, is_sparse=False) for n in (1, 2)}
    ranking = choose(machine, dense)
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1, 2}


def test_no_fused_form_takes_them() -> None:
    """So the simulator counts no bytes of one, and no plan switches to it."""
    sparse, dense = (make_load(nn.Embedding, 4, is_sparse=is_sparse) for is_sparse in (True, False))
    assert sparse.fused_optimizer_bytes == 0
    assert sparse.is_optimizer_outside
    assert dense.fused_optimizer_bytes > 0
    assert not dense.is_optimizer_outside


def test_several_workers_that_are_asked_for_are_refused() -> None:
    """Before anything runs, and with both ways out."""
    load = make_load(nn.Embedding, 4, is_sparse=True)
    with pytest.raises(PlanError) as caught:
        choose(make_machine(cores=2), load, world_size=2)
    text = str(caught.value)
    assert text.startswith("wanted a plan that can run, got none: 2 workers x 1 thread")
    assert text.endswith(f"{REASON}; make its layer with sparse=False, or use one worker")
