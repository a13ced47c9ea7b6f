"""Models that hold a module or a tensor in several places keep their own tensors, and train as written."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from ridgeline.callables.hybridize import hybridize
from ridgeline.plan import Execution, Plan
from ridgeline.programs.module_call import call_with, places
from ridgeline.runtime.steps.step import PlannedStep


class Shared(nn.Module):
    """One block in two places, one weight in two modules, and a buffer that forward assigns anew."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4))
        self.parts = nn.ModuleList([block, nn.Tanh(), nn.Sequential(block, nn.Sigmoid())])
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.mean = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for part in self.parts:
            x = part(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(x - self.mean)


def held(model: nn.Module) -> list[Tensor]:
    """The very tensors, in every place."""
    slots = [slots for part in model.modules() for slots in (part._parameters, part._buffers)]
    return [tensor for slot in slots for tensor in slot.values() if tensor is not None]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


def test_every_place_takes_the_tensors_and_gives_them_back() -> None:
    """As `functional_call` does where nothing is held twice; a result of zeros shows that all were replaced."""
    model = Shared().eval()
    before = held(model)
    zeros = {
        name: torch.zeros_like(tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    named = places(model, zeros)
    assert named["last.weight"] is named["first.weight"]
    assert call_with(model, named, (torch.randn(3, 4),)).count_nonzero() == 0
    assert all(a is b for a, b in zip(held(model), before, strict=True))


@pytest.mark.parametrize("mode", ["script", "compiled", "packaged"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@interpreted()
def test_a_callable_keeps_its_tensors(mode: Execution) -> None:
    """The very same, after captures; and the result follows the weights."""
    model = Shared().eval()
    before = held(model)
    with hybridize(model, torch.randn(3, 4), mode) as hybrid, torch.no_grad():
        for _ in range(2):
            x = torch.randn(3, 4)
            torch.testing.assert_close(hybrid(x), model(x))
            model.first.weight.mul_(1.1)
    assert all(a is b for a, b in zip(held(model), before, strict=True))


@pytest.mark.parametrize("execution", ["compiled", "step-graph", "packaged"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@interpreted()
def test_a_step_trains_as_written(execution: Execution) -> None:
    """Losses and state of some steps."""
    mine, plain = Shared(), Shared()
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (mine, plain)]
    batches = [torch.randn(8, 4) for _ in range(4)]
    with PlannedStep(mine, loss_fn, optimizers[0], Plan(execution=execution), device="cpu") as step:
        for batch in batches:
            optimizers[1].zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            optimizers[1].step()
            torch.testing.assert_close(step(batch), loss.detach())
    torch.testing.assert_close(mine.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)
    assert mine.parts[0][0].weight is mine.parts[2][0][0].weight
    assert all(type(p) is nn.Parameter for p in mine.parameters())


class Recurrent(nn.Module):
    """A recurrent layer, which keeps its weights in a list of its own, too."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 5, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unflatten(0, (2, -1)))[0]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_recurrent_layer_trains_in_one_program(kind: type[nn.RNNBase]) -> None:
    """What stood for its weights is nowhere in it afterwards: that step was refused, since it "keeps tensors"."""
    mine, plain = Recurrent(kind), Recurrent(kind)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (mine, plain)]
    lists = mine.layer._flat_weights
    with PlannedStep(
        mine, loss_fn, optimizers[0], Plan(execution="step-graph"), device="cpu"
    ) as step:
        for batch in (torch.randn(8, 4) for _ in range(4)):
            optimizers[1].zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            optimizers[1].step()
            torch.testing.assert_close(step(batch), loss.detach())
        assert any("step-graph equals the eager step" in note for note in step.notes)
    assert mine.layer._flat_weights is lists
    assert all(a is b for a, b in zip(lists, mine.parameters(), strict=True))
    torch.testing.assert_close(mine.state_dict(), plain.state_dict(), rtol=1e-3, atol=1e-4)
