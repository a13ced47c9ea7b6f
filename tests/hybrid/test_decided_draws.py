"""One program takes steps that compare random numbers with a `layerdrop` of zero, and draws them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.lint.idle_draws import IdleDraw
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.whole_step.program import trace_step
from ridgeline.session import TrainStep

NONE = torch.tensor(0.0)


class Layers(nn.Module):
    """Layers that are left out by chance, as those of transformers are, with dropout between the draws."""

    def __init__(self, skips: Callable[[float], Any], probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.skips = skips
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not (self.training and self.skips(self.probability)):
                x = nn.functional.dropout(layer(x).tanh(), 0.25)
        return x


WAYS: dict[str, Callable[[float], Any]] = {
    "bart": lambda limit: torch.rand([]) < limit,
    "wav2vec2": lambda limit: True if (torch.rand([]) < limit) else False,  # noqa: SIM210 - as written there
    "turned": lambda limit: limit > torch.rand(()),
    "kept": lambda limit: not (torch.rand(1) >= limit).item(),
    "named": lambda limit: torch.lt(torch.rand([]), limit).any(),
}


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def trained(execution: Execution, model: nn.Module, edit: Any = None) -> tuple[list[float], Tensor]:
    """The losses of six steps, and a number that is drawn after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(3, 4, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    torch.manual_seed(5)
    step = TrainStep(model, mean, optimizer, plan=Plan(execution=execution))
    losses = []
    for index, batch in enumerate(batches):
        if edit is not None and index == 3:
            edit(model)
        losses.append(step(batch).item())
    return losses, torch.rand(2)


def layers(way: str, probability: float = 0.0) -> Layers:
    torch.manual_seed(1)
    return Layers(WAYS[way], probability)


@pytest.mark.parametrize("way", ["bart", "wav2vec2"])
def test_a_layerdrop_of_zero_trains_as_written(way: str) -> None:
    """Losses, and the draws of dropout between those of layers, are those of the eager step."""
    wanted, drawn = trained("eager", layers(way))
    losses, drawn_then = trained("step-graph", layers(way))
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(drawn_then, drawn)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_draws_stay_in_the_program_or_beside_it(way: str, device: str) -> None:
    """Where a graph of a GPU is replayed (`meta` stands for one), the host's numbers are drawn beside it."""
    model = layers(way).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program = trace_step(model, mean, optimizer, torch.ones(3, 4, device=device))
    draws = [node for node in program.graph.graph.nodes if "aten.rand." in str(node.target)]
    single = IdleDraw((1,) if way == "kept" else (), torch.float32)
    assert len(draws) == (3 if device == "cpu" else 0)
    assert program.host_draws == (() if device == "cpu" else (single,) * 3)


@pytest.mark.parametrize("probability", [0.5, NONE])
def test_draws_that_may_decide_are_refused(probability: Any) -> None:
    """A probability above zero leaves layers out; what a tensor holds is not known beforehand."""
    with pytest.raises(CaptureError, match="'compiled'"):
        trained("step-graph", layers("bart", probability))


def test_a_layerdrop_that_is_raised_later_is_refused() -> None:
    """The program is of a probability of zero, and no other step runs as it."""
    with pytest.raises(CaptureError, match="depends on the values"):
        trained("step-graph", layers("bart"), lambda model: setattr(model, "probability", 0.5))
