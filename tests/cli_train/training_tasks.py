"""Task files for the tests of `ridgeline train`; the data directory's name says which one is wanted."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ridgeline as rl


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def correct(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).sum()


def task(data_dir: str | None = None) -> rl.Task:
    kind = Path(data_dir).name if data_dir else "plain"
    width = 400_000 if kind == "wide" else 16
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 6, generator=generator)
    y = torch.randint(0, 3, (64,), generator=generator)
    test = TensorDataset(x.clone(), y)
    if kind == "bad":
        x[5] = float("nan")
    return rl.Task(
        name="tiny",
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)),
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        train_data=TensorDataset(x, y),
        test_data=test,
        metric=correct,
        batch_size=8,
    )
