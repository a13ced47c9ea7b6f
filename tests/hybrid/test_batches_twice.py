"""Code that asks whether two tensors of its batch are one, as those of an autoencoder may be."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.step import PlannedStep


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted(), emulated_graphs():
        yield


def given(index: int, *, is_twice: bool) -> list[Tensor]:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(index))
    return [x, x] if is_twice else [x, x.clone()]


def looking(model: nn.Module, batch: list[Tensor]) -> Tensor:
    x, target = batch
    return (model(x) - target * (1.0 if x is target else 0.5)).square().mean()


def reconstructing(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def trained(execution: Execution, loss: object, *, begins_twice: bool) -> tuple[Tensor, float]:
    """Losses of steps of which two have the other kind of batch, and how many ran eagerly after."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, loss, optimizer, Plan(execution=execution), device="cpu") as step:  # type: ignore[arg-type]
        batches = [given(i, is_twice=begins_twice != (i in (6, 7))) for i in range(10)]
        losses = torch.stack([step(batch) for batch in batches])
        return losses, step.timeline().counters.get("eager_steps", 0.0)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd is returning a function")
@pytest.mark.parametrize("begins_twice", [False, True])
@pytest.mark.parametrize("loss", [looking, reconstructing])
@pytest.mark.parametrize(
    "execution", ["compiled", "step-graph", "packaged", "graph", "model-graph"]
)
def test_a_tensor_that_stands_twice(execution: Execution, loss: object, begins_twice: bool) -> None:
    """Each step is that of its batch, whichever kind came first."""
    wanted, _ = trained("eager", loss, begins_twice=begins_twice)
    got, num_eager = trained(execution, loss, begins_twice=begins_twice)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
    if execution == "graph":  # replays what it has captured, with one tensor or with two
        assert num_eager <= 2
