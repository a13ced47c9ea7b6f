"""What stays outside of captured steps: optimizers that no graph can hold, and value checks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from ridgeline.capture.unchecked import NOTE
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Signs(torch.optim.Optimizer):
    """A step of the user's own, whose rate is a Python number and which counts in Python."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad.sign(), alpha=-group["lr"] / self.count)


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 32, generator=generator)
    return x.cuda(), torch.randint(0, 10, (16,), generator=generator).cuda()


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, 0.05, lr_decay=0.1)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, 0.05)


def signs(parameters: Any) -> torch.optim.Optimizer:
    return Signs(parameters, 0.01)


@pytest.mark.parametrize("make_optimizer", [adagrad, adafactor, signs])
@pytest.mark.parametrize("execution", ["graph", "compiled+graph"])
def test_twenty_steps_equal_eager(execution: Execution, make_optimizer: Any) -> None:
    """With clipping, a scheduler, and gradients that somebody drops between steps."""
    results = []
    for mode in ("eager", execution):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10)).cuda()
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.7)
        with PlannedStep(model, loss_fn, optimizer, Plan(execution=mode), clip_norm=0.5) as step:
            for index in range(20):
                step(batch_of(index))
                scheduler.step()
                optimizer.zero_grad()
            counters = step.timeline().counters
            notes = step.notes
        results.append([p.detach().clone() for p in model.parameters()])
    assert counters.get("recaptures", 0) == 0
    name = type(optimizer).__name__
    assert f"the optimizer {name} steps outside of the graph: no graph can hold it" in notes
    for eager, graph in zip(*results, strict=True):
        torch.testing.assert_close(graph, eager, rtol=2e-3, atol=2e-4)


def test_sparse_gradients_train_on() -> None:
    """Rows of a table with sparse gradients, which the optimizer sums up outside of the graph."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch).square().mean()

    results = []
    for mode in ("eager", "graph"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 8, sparse=True)).cuda()
        optimizer = torch.optim.Adagrad(model.parameters(), 0.1)
        with PlannedStep(model, loss, optimizer, Plan(execution=mode)) as step:
            for index in range(8):
                generator = torch.Generator().manual_seed(index)
                step(torch.randint(0, 50, (64,), generator=generator).cuda())
        results.append(model[0].weight.detach().clone())
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(32, 16), nn.Linear(8, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Normal]:
        mean, scale = self.encode(x).chunk(2, dim=1)
        posterior = Normal(mean, nn.functional.softplus(scale))
        return self.decode(posterior.rsample()), posterior


def bound(model: nn.Module, batch: Any) -> Tensor:
    decoded, posterior = model(batch[0])
    prior = Normal(torch.zeros_like(posterior.mean), torch.ones_like(posterior.mean))
    return (decoded - batch[0]).square().mean() + 0.01 * kl_divergence(posterior, prior).mean()


@pytest.mark.parametrize("execution", ["graph", "compiled+graph", "step-graph"])
def test_a_variational_autoencoder_is_captured(execution: Execution) -> None:
    """Its distributions check their parameters in eager steps, which waits for the device."""
    torch.manual_seed(0)
    model = Variational().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with PlannedStep(model, bound, optimizer, Plan(execution=execution)) as step:
        losses = [float(step(batch_of(0))) for _ in range(30)]
        assert NOTE in step.notes
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="constraint"):
        Normal(0.0, -1.0)
