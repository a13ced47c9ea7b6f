"""What the cases of `training_worker` train: models, batches, optimizers, and one process as their reference."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.plan import Plan, Sync
from ridgeline.runtime.sync.transports.scaling import Scaling

STEPS = 6
WORDS = 11
STORE, PLAIN = "kvstore", "all_reduce"
Losses = Callable[[nn.Module, Any], Tensor]


class Net(nn.Module):
    """A scalar, tied weights, a layer that is used where the batch says so, a frozen one, one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 37), nn.Linear(37, 37)
        self.third = nn.Linear(37, 37, bias=False)
        self.third.weight = self.second.weight
        self.frozen, self.last, self.unused = nn.Linear(37, 37), nn.Linear(37, 5), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, *, deep: bool = True) -> Tensor:
        hidden = self.first(x).relu()
        hidden = self.third(self.second(hidden).relu()) if deep else hidden
        return self.last(self.frozen(hidden).relu() * self.scale)


class Words(nn.Module):
    """An embedding with sparse rows, and what is dense unless `only`."""

    def __init__(self, *, only: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 4, sparse=True)
        self.last = None if only else nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.words(x).mean(1)
        return mean if self.last is None else self.last(mean)


def optimizer_of(model: nn.Module, case: dict[str, Any]) -> Optimizer:
    """Of two groups with settings of their own, and parameters that are in none."""
    parameters = [p for n, p in model.named_parameters() if n != case.get("left_out")]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if case.get("grouped", True):
        groups = [
            {"params": parameters[:2], "lr": 1e-2},
            {"params": parameters[2:], "lr": 5e-3, **case.get("own", {})},
        ]
    made: Any = getattr(torch.optim, case["optimizer"])
    return made(groups, **case.get("settings", {}))


def plan_of(size: int, algorithm: str, case: dict[str, Any]) -> Plan:
    options = case.get("store", {}) if algorithm == STORE else {}
    sync = Sync(algorithm=algorithm, options=options, bucket_bytes=(400, 2000))
    return Plan(workers=size, threads=1, sync=sync, **case.get("knobs", {}))


def dense_batch(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def sparse_batch(rank: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, WORDS, (8, 2), generator=generator)
    return ids, torch.randint(0, 3, (8,), generator=generator)


def skipping(case: dict[str, Any], rank: int, size: int) -> bool:
    who = case.get("skips", "nobody")
    return who == "all" or (who == "last" and rank == size - 1)


def loss_of(*, deep: bool = True) -> Losses:
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0], deep=deep), batch[1])


def words_loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Setup:
    """What a case trains, and on what."""

    def __init__(self, case: dict[str, Any], rank: int, size: int) -> None:
        torch.manual_seed(0)
        kind = case.get("model", "net")
        self.model = Net() if kind == "net" else Words(only=kind == "only words")
        self.optimizer = optimizer_of(self.model, case)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.batch = dense_batch if kind == "net" else sparse_batch
        deep = not skipping(case, rank, size)
        self.loss_fn = loss_of(deep=deep) if kind == "net" else words_loss

    def parameters(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def by_one(case: dict[str, Any], size: int) -> Setup:
    """Training of one process that adds up the gradients of all batches in the order of workers."""
    setup = Setup(case, 0, size)
    scaling = Scaling.over(size)
    losses = [Setup(case, rank, size).loss_fn for rank in range(size)]
    for step in range(STEPS):
        sums: dict[nn.Parameter, Tensor] = {}
        for rank, loss_fn in enumerate(losses):
            setup.optimizer.zero_grad()
            loss_fn(setup.model, setup.batch(rank, step)).backward()
            for p in setup.model.parameters():
                if p.grad is not None:
                    own = p.grad.coalesce().to_dense() if p.grad.is_sparse else p.grad
                    scaled = own * scaling.factor
                    sums[p] = sums[p] + scaled if p in sums else scaled
        for p in setup.model.parameters():
            p.grad = sums[p] * (1.0 / scaling.excess) if p in sums else None
            if p is getattr(getattr(setup.model, "words", None), "weight", None):
                p.grad = p.grad.to_sparse(1)
        setup.optimizer.step()
        setup.scheduler.step()
    return setup


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same bits; of momenta, None is none."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        one, other = (
            {k: v for k, v in tree.items() if v is not None and v != {}} for tree in (one, other)
        )
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def gap(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))
