"""What the workers of `sparse_worker` train: layers with sparse gradients, alone and beside dense ones."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.plan import Plan, Sync

WORDS, WIDTH = 30, 4
STEPS = 12


class Words(nn.Module):
    """A table whose rows are averaged, and what is dense unless `only`; `uses` says whether it is used at all."""

    def __init__(self, *, only: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.last = None if only else nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, *, uses: bool = True) -> Tensor:
        if not uses:
            return (self.last or nn.Identity())(torch.ones(len(x), WIDTH, device=x.device))
        mean = self.words(x).mean(1)
        return mean if self.last is None else self.last(mean)


class Bags(nn.Module):
    """Bags, a table of another width and type, a dense table, and layers behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(WORDS, WIDTH, sparse=True, mode="sum")
        self.doubles = nn.Embedding(7, 3, sparse=True, dtype=torch.float64)
        self.dense = nn.Embedding(WORDS, 5)
        self.frozen = nn.Embedding(WORDS, 2, sparse=True).requires_grad_(requires_grad=False)
        self.first, self.last = nn.Linear(WIDTH + 3 + 5 + 2, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, uses: bool = True) -> Tensor:
        bags = self.bags(x) if uses else torch.ones(len(x), WIDTH, device=x.device)
        doubles = self.doubles(x[:, 0] % 7).float()
        parts = (bags, doubles, self.dense(x).mean(1), self.frozen(x[:, 1]))
        return self.last(torch.relu(self.first(torch.cat(parts, 1))))


class Tied(nn.Module):
    """A table that is the weight of the last layer as well, where that is used: its gradient is dense there."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor, *, uses: bool = True) -> Tensor:
        hidden = self.mix(self.words(x).mean(1))
        return (self.head(hidden) if uses else hidden)[:, :3]


def with_max_norm() -> nn.Module:
    """Whose forward pass writes its table."""
    return nn.Sequential(nn.EmbeddingBag(WORDS, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "max norm": with_max_norm,
    "words": Words,
    "only words": lambda: Words(only=True),
    "bags": Bags,
    "tied": Tied,
}


def batch_of(rank: int, step: int, samples: int = 8, *, is_distinct: bool = False) -> Any:
    """Numbers of rows, of which the first worker has more, and classes; or as many, none of them twice."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    if is_distinct:
        ids = 7 * torch.randperm(4, generator=generator)[:, None] + torch.tensor([0, 4, 5])
        ids[:, 0] += torch.arange(4)  # of another remainder by 7 in each sample
        return ids, torch.randint(0, 3, (4,), generator=generator)
    ids = torch.randint(0, WORDS, (samples, 2 + 3 * (rank == 0)), generator=generator)
    return ids, torch.randint(0, 3, (samples,), generator=generator)


def optimizer_of(model: nn.Module, case: dict[str, Any]) -> Optimizer:
    made: Any = getattr(torch.optim, case["optimizer"])
    return made(model.parameters(), **{"lr": 0.1, **case.get("settings", {})})


def plan_of(size: int, case: dict[str, Any]) -> Plan:
    sync = Sync(**{"bucket_bytes": (100, 400), **case.get("sync", {})})
    return Plan(workers=size, threads=1, sync=sync, **case.get("knobs", {}))


def loss_of(case: dict[str, Any], rank: int, size: int) -> Callable[[nn.Module, Any], Tensor]:
    """`skips` says who does not use the layer: `nobody`, the `last` worker, or `all`."""
    who = case.get("skips", "nobody")
    uses = not (who == "all" or (who == "last" and rank == size - 1))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0], uses=uses), batch[1])

    return loss_fn


def by_one(case: dict[str, Any], size: int) -> tuple[nn.Module, Optimizer]:
    """Training of one process that makes the mean of the workers' gradients, dense and in their order."""
    torch.manual_seed(0)
    model = MODELS[case["model"]]()
    optimizer = optimizer_of(model, case)
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        sparse: set[nn.Parameter] = set()
        dense: set[nn.Parameter] = set()
        for rank in range(size):
            model.zero_grad()
            loss_of(case, rank, size)(model, batch_of(rank, step)).backward()
            for p in model.parameters():
                if p.grad is not None:
                    (sparse if p.grad.is_sparse else dense).add(p)
                    own = p.grad.coalesce().to_dense() if p.grad.is_sparse else p.grad
                    sums[p] = sums.get(p, torch.zeros_like(p)) + own
        for p in model.parameters():
            mean = sums[p] / size if p in sums else None
            is_rows = mean is not None and p in sparse - dense
            p.grad = mean.to_sparse(1) if is_rows else mean  # type: ignore[union-attr]
        optimizer.step()
    return model, optimizer


TRAINED: dict[str, dict[str, Any]] = {
    "EmbeddingBag, SGD": {"model": "bags", "optimizer": "SGD"},
    "EmbeddingBag, Adagrad": {"model": "bags", "optimizer": "Adagrad"},
    "Embedding, SGD with momentum": {
        "model": "words",
        "optimizer": "SGD",
        "settings": {"momentum": 0.9},
    },
    "Embedding alone, SparseAdam": {"model": "only words", "optimizer": "SparseAdam"},
    "accumulated": {"model": "bags", "optimizer": "SGD", "knobs": {"accumulate": 2}},
    "by a ring": {"model": "bags", "optimizer": "SGD", "sync": {"algorithm": "ring"}},
    "nothing dense to compress": {
        "model": "only words",
        "optimizer": "SparseAdam",
        "sync": {"compression": "topk"},
    },
    "tied, and used as rows": {"model": "tied", "optimizer": "SGD", "skips": "all"},
}
BEYOND_DDP: dict[str, dict[str, Any]] = {
    "a worker that does not use it": {"model": "words", "optimizer": "SGD", "skips": "last"},
    "nobody uses it": {"model": "words", "optimizer": "SGD", "skips": "all"},
    "bags that a worker does not use, Adagrad": {
        "model": "bags",
        "optimizer": "Adagrad",
        "skips": "last",
    },
    "tied": {"model": "tied", "optimizer": "SGD"},
    "tied, and dense on some": {"model": "tied", "optimizer": "SGD", "skips": "last"},
}
