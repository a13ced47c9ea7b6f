"""A step as one program beside the eager step: after every change both must train alike."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep

STEP_GRAPH = Plan(execution="step-graph")


def make(dropout: float = 0.25) -> nn.Module:
    """A small network with batch norm and two dropouts."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(8, 8),
        nn.Dropout(dropout),
        nn.Linear(8, 3),
    )


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def batch_of(index: int, size: int = 8) -> dict[str, Tensor]:
    """Batch number `index`."""
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(size, 6, generator=generator)
    return {"x": x, "y": torch.randint(0, 3, (size,), generator=generator)}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), 0.01)


class Pair(NamedTuple):
    """A step as one program beside the eager step, from the same start."""

    program: PlannedStep
    eager: PlannedStep

    def both(self, change: Any) -> None:
        for step in self:
            change(step)

    def run(self, index: int, size: int = 8) -> None:
        losses = []
        for step in self:
            torch.manual_seed(index)
            losses.append(step(batch_of(index, size)))
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)

    def counters(self) -> dict[str, float]:
        return self.program.timeline().counters

    def train(self, steps: int, changes: dict[int, Callable[[PlannedStep], Any]]) -> None:
        """Some steps, each change made to both before the step of its number; they end alike."""
        for index in range(steps):
            if index in changes:
                self.both(changes[index])
            self.run(index)
        states = (step.model.state_dict().values() for step in self)
        for mine, theirs in zip(*states, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@contextlib.contextmanager
def pair_of(
    model: Callable[[], nn.Module] = make,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    loss: Callable[[], Any] = lambda: loss_fn,
    plan: Plan = STEP_GRAPH,
) -> Iterator[Pair]:
    """The pair, closed at the end; `loss()` makes a loss function for each, `plan` is the first one's."""
    steps = []
    for each in (plan, Plan()):
        made = model()
        steps.append(PlannedStep(made, loss(), optimizer(made), each, device="cpu"))
    try:
        yield Pair(*steps)
    finally:
        for step in steps:
            step.close()
