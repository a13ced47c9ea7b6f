"""Tasks and worker functions of these tests; importable in other processes."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ridgeline.codec import Value
from ridgeline.errors import RidgelineError
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.training.loop import train
from ridgeline.runtime.training.task import Task
from ridgeline.workers.world import World


class Net(nn.Module):
    """Dropout, batch norm and a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
        )
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Observing(Net):
    """Keeps a mean of what it sees, in evaluation too, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(x.mean(0), 0.3)
        return super().forward(x - self.seen)


class Slow(torch.optim.Optimizer):
    """Around another optimizer: every third step brings slow weights halfway on. Saves itself in its own form."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.count = inner, 0
        self.param_groups, self.state = inner.param_groups, inner.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            parameters = [p for group in self.param_groups for p in group["params"]]
            for parameter, slow in zip(parameters, self.slow, strict=True):
                parameter.copy_(slow.lerp_(parameter, 0.5))

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "count": self.count, "slow": self.slow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.count, self.slow = state_dict["count"], [t.clone() for t in state_dict["slow"]]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def correct(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).argmax(1) == batch[1]).sum()


def task(*, samples: int = 45, bad_sample: int | None = None, lr: float = 0.05) -> Task:
    """45 samples in batches of 8: five whole batches and one of five samples."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, 6, generator=generator)
    y = torch.randint(0, 3, (samples,), generator=generator)
    if bad_sample is not None:
        x[bad_sample, 2] = float("inf")
    data = TensorDataset(x, y)
    return Task(
        name="tiny",
        model=Net,
        loss_fn=loss_fn,
        optimizer=lambda model: torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=lr
        ),
        train_data=data,
        test_data=TensorDataset(x[:11].nan_to_num(posinf=0.0), y[:11]),
        metric=correct,
        batch_size=8,
        clip_norm=1.0,
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, T_max=steps
        ),
    )


class Ask(Value, frozen=True, kw_only=True):
    """What a group of workers is asked to train."""

    run_dir: str
    epochs: int
    resume: bool = False
    stop_at: int | None = None
    checkpoint_every: int | None = None
    bad_sample: int | None = None
    lr: float = 0.05
    bad_gradient: bool = False
    odd_state: bool = False
    unreadable: bool = False
    """Whether the state of rank 1 cannot be read."""
    spent: bool = False
    """Whether the model can be made once only, as where memory is short."""
    observing: bool = False
    slow: bool = False
    every: int = 1
    """Steps between two exchanges."""


class Told(Value, frozen=True, kw_only=True):
    """What rank 0 tells of it."""

    losses: list[float] = []
    metrics: list[float] = []
    mean_losses: list[float] = []
    errors: list[str] = []
    said: list[str] = []


class StopHereError(Exception):
    """Stands for a kill in the middle of a run."""


def _gone(*_: Any) -> None:
    """Stands for weights that are read from a file when they are asked for."""
    raise OSError("the file is gone")


def run(request: bytes) -> bytes:
    """Train on every rank, one request after the other; what rank 0 tells of each."""
    world = World.join(threads=1, device="cpu")
    asks = msgspec.json.decode(request, type=list[Ask])
    return msgspec.json.encode([run_here(ask, world) for ask in asks])


def run_here(ask: Ask, world: World) -> Told:
    """Train on this worker; what it tells, errors of ours included."""
    try:
        return train_here(ask, world)
    except StopHereError:
        return Told(errors=["stopped"])
    except (RidgelineError, OSError) as error:
        text = f"{type(error).__name__}: {error}"
        if world.size == 1:
            return Told(errors=[text])
        texts: list[Any] = [None] * world.size
        torch.distributed.all_gather_object(texts, text)
        return Told(errors=texts)


def train_here(ask: Ask, world: World) -> Told:
    """Train on this worker."""
    made = task(bad_sample=ask.bad_sample, lr=ask.lr)
    calls = 0

    def counted(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == ask.stop_at:
            raise StopHereError
        loss = loss_fn(model, batch)
        if ask.odd_state and calls > 1:  # as an optimizer of the task's own may keep it
            made_optimizers[-1].state[next(model.parameters())]["odd"] = object()
        if ask.unreadable and calls == 2 and world.rank == 1:
            model.register_state_dict_post_hook(_gone)
        if ask.bad_gradient:  # zero forward, without a finite slope
            loss = loss + torch.sqrt(0 * next(model.parameters()).sum())
        return loss

    made_optimizers = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        inner = make_optimizer(model)
        made_optimizers.append(Slow(inner) if ask.slow else inner)
        return made_optimizers[-1]

    make_optimizer = made.optimizer

    def model() -> nn.Module:
        if ask.spent and made_optimizers:
            raise torch.OutOfMemoryError("tried to allocate\n2 GiB")
        return Observing() if ask.observing else Net()

    made = dataclasses.replace(made, model=model, loss_fn=counted, optimizer=optimizer)
    said: list[str] = []
    result = train(
        made,
        Plan(workers=world.size, threads=1, sync=Sync(every=ask.every)),
        world,
        run_dir=Path(ask.run_dir),
        epochs=ask.epochs,
        seed=5,
        resume=ask.resume,
        checkpoint_every=ask.checkpoint_every,
        say=said.append,
    )
    return Told(
        losses=[point.loss for point in result.history.steps],
        metrics=[point.metric for point in result.history.epochs],
        mean_losses=[point.mean_loss for point in result.history.epochs],
        said=said,
    )
