"""The check of a mode leaves nothing behind, be it in an optimizer of the user's own."""

from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.workers.world import World


class Fading(torch.optim.Optimizer):
    """Counts its steps in Python, and keeps a history; its steps get shorter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count = 0
        self.history: list[int] = []
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += 1
        self.history.append(self.count)
        self.total += self.count
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] / self.count)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_an_optimizer_that_counts_in_python() -> None:
    """All runs begin with the same count, so that they are equal, and in the end it is as it was."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = Fading(model.parameters())
    world = World.join(device="cpu")
    body = StepBody(
        model, mean_square, optimizer, Plan(), None, clip_norm=None, device=world.device
    )
    batch = torch.randn(5, 4)
    body(batch, Recorder(HostClock()))
    weights, notes = model.weight.detach().clone(), list[str]()
    check_replay(
        body,
        batch,
        [batch],
        LearningRates(optimizer),
        lambda: body(batch, Recorder(HostClock())),
        world=world,
        notes=notes,
    )
    assert "equals the eager step within 0.0e+00 of the update" in notes[0]
    assert (optimizer.count, optimizer.history, float(optimizer.total)) == (1, [1], 1.0)
    assert torch.equal(model.weight, weights)
