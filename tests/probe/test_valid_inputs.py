"""Made-up values are in range for the very operator that reads memory by them, or checks them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_replay import op, spec
from torch import Tensor, nn
from torch.nn import functional

from ridgeline.probe.operators import values
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.valid_inputs import Made, valid_inputs
from ridgeline.tracing.capture import trace
from ridgeline.workload import Workload

CPU = torch.device("cpu")
Forward = Callable[[nn.Module, Any], Tensor]


class _Positions(nn.Module):
    """Tokens of a large table and positions of a small one, counted up from the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 8)
        self.positions = nn.Embedding(7, 8)
        self.bias = nn.Embedding(3, 2)

    def forward(self, ids: Tensor) -> Tensor:
        ones = torch.ones_like(ids)
        places = (ones.cumsum(-1) - 1).masked_fill(ones == 0, 1)
        x = self.tokens(ids) + self.positions(places) + self.positions(torch.arange(7))
        steps = torch.arange(7)
        distance = (steps[None, :] - steps[:, None]).abs()
        is_near = distance < 2
        far = 2 + (torch.log(distance.float() / 2) * 4).to(torch.long)
        bucket = torch.where(is_near, distance, torch.minimum(far, torch.full_like(far, 2)))
        return x.mean() + self.bias(bucket).mean()


class _Tables(nn.Module):
    """Every way to index: by gathering, scattering, adding, putting, and by several tensors at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 6))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table[ids] * 1.0
        chosen = x.argmax(-1, keepdim=True) + 30
        total = x.gather(1, chosen.clamp(max=5)).sum() + x.index_select(0, ids % 9).sum()
        total = total + torch.zeros(4, 6).scatter_add(0, (ids[:, None] % 4).expand(9, 6), x).sum()
        total = total + torch.zeros(3, 6).index_add(0, ids % 3, x).sum()
        y = torch.zeros(9, 2, 6).index_put((torch.arange(9), ids % 2), x)
        return total + y[:, 1].sum() + functional.one_hot(ids % 5, 5).to(x.dtype).mean()


class _Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(30, 4, mode=mode)

    def forward(self, ids: Tensor) -> Tensor:
        return self.bags(ids, torch.tensor([0, 2, 5])).sum()


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 6)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        scores = self.head(x).log_softmax(-1)
        return functional.ctc_loss(scores, targets, [9, 9], [3, 2])


def workload_of(model: nn.Module, batch: Any, loss: Forward | None = None) -> Workload:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return trace(model, loss or (lambda model, batch: model(batch)), optimizer, batch)


def _speech() -> Workload:
    """Recorded from a real step: its loss looks at the values of the targets."""
    model = _Speech()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(9, 2, 4), torch.randint(1, 6, (2, 3)))
    return trace(model, lambda model, batch: model(*batch), optimizer, batch, may_run=True)


def _ignoring(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], ignore_index=3)


def _odds(model: nn.Module, batch: Tensor) -> Tensor:
    p = model(batch).log().exp()  # NaN, where made-up inputs of log are below 0
    return functional.binary_cross_entropy(p, torch.bernoulli(p.detach()))


CASES: dict[str, Callable[[], Workload]] = {
    "positions": lambda: workload_of(_Positions(), torch.randint(0, 50, (2, 7))),
    "tables": lambda: workload_of(_Tables(), torch.arange(9)),
    "bags, sum": lambda: workload_of(_Bags("sum"), torch.arange(8)),
    "bags, mean": lambda: workload_of(_Bags("mean"), torch.arange(8)),
    "bags, max": lambda: workload_of(_Bags("max"), torch.arange(8)),
    "speech": _speech,
    "labels": lambda: workload_of(
        nn.Linear(4, 5), (torch.randn(6, 4), torch.arange(6) % 5), _ignoring
    ),
    "odds": lambda: workload_of(nn.Sequential(nn.Linear(4, 3)), torch.randn(6, 4), _odds),
    "pooling": lambda: workload_of(
        nn.Conv2d(1, 2, 3),
        torch.randn(2, 1, 8, 8),
        lambda model, x: functional.max_pool2d(model(x), 2).sum(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_index_is_in_range_for_its_operator(case: str) -> None:
    """No op of the step fails, in any pass, whatever flows to it from made-up data."""
    workload = CASES[case]()
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for _ in range(3):
            assert len(replay.run(lambda index: True)) == len(workload.ops)
            assert replay.failures == {}


@pytest.mark.parametrize("case", CASES)
def test_indices_are_in_range_when_what_makes_them_is_not_issued(case: str) -> None:
    """Each op by itself, among stand-ins: those have no garbage to index with."""
    workload = CASES[case]()
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for only in range(len(workload.ops)):
            replay.run(lambda index, only=only: index == only)
    assert replay.failures == {}


def test_each_input_has_a_bound_of_its_own() -> None:
    """Two index tensors of one call are bounded by their dimensions; a mask picks as many as they have."""
    x, mask = spec(7, 3, 5, 2), spec(3, 5, dtype="bool")
    rows, last = spec(4, dtype="int64"), spec(4, dtype="int32")
    arguments = {
        "args": [{"tensor": 0}, [{"tensor": 1}, {"tensor": 2}, {"tensor": 3}]],
        "kwargs": {},
    }
    found = valid_inputs(op("aten.index.Tensor", [x, rows, mask, last], arguments))
    assert found == {1: Made("index", 7), 2: Made("trues", 4), 3: Made("index", 2)}


def test_operators_that_index_nothing_need_nothing() -> None:
    """A product of matrices, and a division of floats, take whatever flows."""
    x = spec(4, 4)
    both = {"args": [{"tensor": 0}, {"tensor": 1}], "kwargs": {}}
    assert valid_inputs(op("aten.mm.default", [x, x], both)) == {}
    assert valid_inputs(op("aten.div.Tensor", [x, x], both)) == {}
    whole = spec(4, 4, dtype="int64")
    assert valid_inputs(op("aten.div.Tensor", [whole, whole], both)) == {1: Made("index", 3, 1)}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (Made("starts", 10), [0, 2, 5, 7]),
        (Made("bounds", 10), [0, 3, 6, 10]),
        (Made("parts", 10), [2, 3, 2, 3]),
        (Made("constant", 6), [6, 6, 6, 6]),
    ],
)
def test_values_that_depend_on_their_place(made: Made, expected: list[int]) -> None:
    """Starts ascend below the bound, bounds reach it, and parts add up to it."""
    tensor = values.made_up(spec(4, dtype="int64"), CPU, made)
    assert tensor.tolist() == expected


def test_as_many_are_true_as_wanted() -> None:
    """A mask for which the source has seven values has seven true elements."""
    arguments = {"args": [{"tensor": 0}, {"tensor": 1}, {"tensor": 2}], "kwargs": {}}
    scatter = op(
        "aten.masked_scatter.default", [spec(4, 3), spec(4, 3, dtype="bool"), spec(7)], arguments
    )
    (made,) = valid_inputs(scatter).values()
    assert int(values.made_up(scatter.inputs[1], CPU, made).sum()) == 7


class _Picked(nn.Module):
    """Sizes that the data decides: by masks that pick, and by where numbers are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(40, 6))

    def forward(self, weights: Tensor) -> Tensor:
        where = (weights > 0.9).float().nonzero()  # 4 of 40
        is_kept = where[:, 0] != 3
        left = where[is_kept][:, 0].expand(2, 3)  # nothing else fits where another number is picked
        total = (
            self.table[left].sum()
            + self.table.masked_select(weights[:, None] > 0.9).view(4, 6).sum()
        )
        spread = torch.zeros(40, 6).index_put((weights > 0.9,), self.table[where[:, 0]])
        adjacency = torch.sparse_coo_tensor(
            torch.stack((where[:, 0], where[:, 0])),
            weights[where[:, 0]],
            (40, 40),
            check_invariants=False,
        )
        return total + spread.sum() + (adjacency @ self.table).sum()


def test_masks_pick_as_many_as_were_picked() -> None:
    """What later operators expect of a size that the data decides is there in a replay: nothing fails."""
    torch.manual_seed(0)
    weights = torch.linspace(0.0, 0.8, 40)
    weights[[3, 11, 25, 38]] = 1.0
    model = _Picked()
    workload = trace(
        model,
        lambda model, batch: model(batch),
        torch.optim.SGD(model.parameters(), lr=0.1),
        weights,
        may_run=True,
    )
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        taken = replay.run(lambda index: True)
    assert replay.failures == {}
    assert len(taken) == len(workload.ops)
    sparse = [i for i, op in enumerate(workload.ops) if "sparse" in op.name]
    with (
        torch.no_grad()
    ):  # what reads a sparse tensor that was not made is passed over, and does not fail
        passed = taken.keys() - replay.run(lambda index: index not in sparse).keys()
    assert passed > set(sparse)
    assert replay.failures == {}


def test_numbers_stay_ordinary_through_deep_networks() -> None:
    """After 60 layers forward and backward nothing is NaN, infinite, or too small to be normal."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(60)]
    workload = workload_of(
        nn.Sequential(*layers), torch.randn(8, 64), lambda model, x: model(x).square().mean()
    )
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for _ in range(4):
            replay.run(lambda index: True)
            replay.refresh()
    for place, tensor in replay._pool.items():
        assert bool(tensor.isfinite().all()), place


def test_values_that_diverged_are_drawn_again() -> None:
    """NaN in one parameter gives all of them new values; finite ones are left alone."""
    workload = workload_of(
        nn.Linear(4, 3), torch.randn(2, 4), lambda model, x: model(x).square().mean()
    )
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        replay.run(lambda index: True)
        held = {place: t for place, t in replay._pool.items() if place[0] == "parameter"}
        before = [tensor.clone() for tensor in held.values()]
        replay.refresh()
        assert all(map(torch.equal, before, held.values()))
        next(iter(held.values())).fill_(float("nan"))
        replay.refresh()
    assert all(bool(tensor.isfinite().all()) for tensor in held.values())


def test_moments_of_equal_shape_are_two_tensors() -> None:
    """What Adam takes the root of stays positive, and memory is read that a real step reads."""
    model = nn.Linear(4, 3, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    workload = trace(model, lambda model, x: model(x).sum(), optimizer, torch.randn(2, 4))
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        for _ in range(3):
            replay.run(lambda index: True)
    states = [t for place, t in replay._pool.items() if place[0] == "state" and t.dim()]
    assert len({tensor.data_ptr() for tensor in states}) == 2
    assert all(bool(tensor.isfinite().all()) for tensor in replay._pool.values())


class _TwoTables(nn.Module):
    """Bags of two tables, summed; each gradient is sparse, of another shape than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, 4, mode="sum", sparse=True) for rows in (20, 30)
        )

    def forward(self, batch: Any) -> Tensor:
        parts = zip(self.tables, batch, strict=True)
        return torch.stack([table(*bags).sum() for table, bags in parts]).sum()


def test_a_sparse_tensor_shows_no_part_of_another() -> None:
    """It has no strides by which to tell; several tables with sparse gradients are timed all the same."""
    model = _TwoTables()
    bags = [(torch.arange(size) % 5, torch.tensor([0, 2, 2])) for size in (6, 9)]
    workload = trace(
        model, lambda model, batch: model(batch), torch.optim.SGD(model.parameters(), lr=0.1), bags
    )
    replay = WorkloadReplay(workload.ops, CPU)
    with torch.no_grad():
        taken = replay.run(lambda index: True)
    # Of which op the second table's update has its gradient, the trace does not say.
    assert set(replay.failures.values()) <= {
        "the op that makes its workspace or sparse tensor cannot be issued"
    }
    left = [op.name for n, op in enumerate(workload.ops) if n not in taken]
    assert left in ([], ["aten.add_.Tensor"])
