"""Sparse gradients: plans of several workers exchange them by rows; what cannot is left out, with the reason."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.planner.exchanges.exchange_table import exchange_table
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload
from strategies import make_machine

DENSE = "make its layer with sparse=False"
CAPTURED = (
    "captures the step (execution='graph'), while the sparse gradient of 0.weight has another number of rows "
    "in each step"
)
DIVIDED = (
    "divides the update among workers (sync.algorithm='sharded') by parts of dense gradients, while that of "
    "0.weight is sparse"
)
WITH_MOMENTUM = (
    "accumulates momentum before it sends (sync.compression='topk' with momentum=0.5), which the rows of the "
    "sparse gradient of 0.weight would not have"
)
OF_NO_LAYER = (
    "has a sparse gradient for table, which is not the weight of an nn.Embedding or nn.EmbeddingBag with "
    "sparse=True: workers exchange no others"
)


class Last(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1)[:, :16]


class Functional(nn.Module):
    """Looks up rows of a parameter that is no layer's."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(100, 16))
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.embedding(x, self.table, sparse=True).mean(1))


def traced(model: nn.Module, samples: int) -> Workload:
    batch = torch.zeros(samples, 5, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trace(model, lambda model, batch: model(batch).square().mean(), optimizer, batch)


def make_load(layer: type[nn.Module], samples: int, *, is_sparse: bool = True) -> Workload:
    """One step of a table of vectors and a linear layer."""
    return traced(
        nn.Sequential(layer(100, 16, sparse=is_sparse), Last(), nn.Linear(16, 1)), samples
    )


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_several_workers_are_compared(layer: type[nn.Module]) -> None:
    """As with dense gradients of the same layer; a note tells of how many rows that is for."""
    ranking = choose(make_machine(cores=2), {n: make_load(layer, 8 // n) for n in (1, 2)})
    assert {candidate.plan.workers for candidate in ranking.candidates} == {1, 2}
    assert not any("left out" in note for note in ranking.notes)
    assert (
        "assumed of sparse gradients: each worker sends 20 rows of 0.weight, as if no number came twice in "
        "its batch"
    ) in ranking.notes


def test_captured_plans_are_left_out() -> None:
    """Each mode once, with the reason; plans that issue the step anew stay."""
    load = msgspec.structs.replace(make_load(nn.Embedding, 8), device="cuda")
    ranking = choose(make_machine(device="cuda", dispatch_s=5e-3), load, world_size=2)
    executions = {candidate.plan.execution for candidate in ranking.candidates}
    assert "eager" in executions
    assert not any("graph" in execution for execution in executions)
    told = [note for note in ranking.notes if note.endswith(CAPTURED)]
    assert len(told) == 1


@pytest.mark.parametrize(
    ("fixed", "reason", "advice"),
    [
        ({"algorithm": "sharded"}, DIVIDED, f"use another algorithm, or {DENSE}"),
        (
            {"compression": "topk", "options": {"momentum": 0.5}},
            WITH_MOMENTUM,
            f"leave the option out, or {DENSE}",
        ),
    ],
)
def test_what_is_asked_for_and_cannot_be_is_refused(
    fixed: dict[str, Any], reason: str, advice: str
) -> None:
    """Before anything runs, and with the ways out."""
    with pytest.raises(PlanError) as caught:
        choose(make_machine(cores=2), make_load(nn.Embedding, 4), world_size=2, fixed=fixed)
    text = str(caught.value)
    assert text.startswith("wanted a plan that can run, got none: 2 workers x 1 thread")
    assert text.endswith(f" {reason}; {advice}")


def test_rows_of_a_parameter_that_is_no_layers_are_refused() -> None:
    """The runtime does not know of them beforehand; workers that exchange parameters need not."""
    load = traced(Functional(), 4)
    with pytest.raises(PlanError) as caught:
        choose(make_machine(cores=2), load, world_size=2)
    wanted = f"{OF_NO_LAYER}; use one of these, make it dense, or use one worker"
    assert str(caught.value).endswith(wanted)
    ranking = choose(make_machine(cores=2), load, world_size=2, fixed={"every": 4})
    assert {candidate.plan.sync.every for candidate in ranking.candidates} == {4}


def test_the_table_of_exchanges_counts_rows() -> None:
    """20 rows with their numbers instead of the table; and says what cannot exchange them."""
    plan = Plan(workers=2, threads=1, sync=Sync())
    found = exchange_table(
        make_machine(cores=2), {2: make_load(nn.Embedding, 4)}, plan, allow=("local-steps",)
    )
    (held,) = [row for row in found if "held" in row.options]
    assert held.verdict == "not compared: some gradients are sparse"
    rows = {(row.algorithm, row.compression, row.every): row for row in found if row is not held}
    last = 2 * 64  # bias and weight, each from a new line of memory
    plain = rows["all_reduce", "none", 1]
    assert plain.sent_bytes == last + 20 * (8 + 16 * 4)
    assert rows["sharded", "none", 1].verdict == (
        f"wanted a plan that can exchange sparse gradients, got one that {DIVIDED}; use another algorithm, or "
        f"{DENSE}"
    )
    apart = next(row for row in rows.values() if row.every > 1)
    assert apart.sent_bytes == round((100 * 16 * 4 + last) / apart.every)


def test_no_fused_form_takes_them() -> None:
    """So the simulator counts no bytes of one, and no plan switches to it."""
    sparse, dense = (make_load(nn.Embedding, 4, is_sparse=is_sparse) for is_sparse in (True, False))
    assert sparse.fused_optimizer_bytes == 0
    assert sparse.is_optimizer_outside
    assert dense.fused_optimizer_bytes > 0
    assert not dense.is_optimizer_outside
