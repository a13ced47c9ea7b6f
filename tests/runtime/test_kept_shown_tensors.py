"""What a step shows under a name may be kept: later replays leave it as it is. Graphs are emulated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from emulated_graphs import emulated_graphs
from ridgeline.errors import ObstacleError
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep

NUM_STEPS = EAGER_STEPS + 3


class Pair(NamedTuple):
    loss: Tensor
    parts: list[Any]


@dataclass(frozen=True)
class Logged:
    loss: Tensor
    inner: dict[str, Tensor]


SHAPES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a tensor": lambda loss, out: loss,
    "a dictionary": lambda loss, out: {"loss": loss, "out": out},
    "tuples and lists": lambda loss, out: Pair(loss, [out, (loss, 3)]),
    "a dataclass": lambda loss, out: Logged(loss, {"out": out}),
}


class Trainer:
    """Keeps what the last step has logged, anew each time or in one dictionary."""

    def __init__(self, shape: Callable[[Tensor, Tensor], Any]) -> None:
        self.shape, self.logged, self.logs = shape, None, dict[str, Any]()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch)
        loss = out.square().mean()
        self.logged = self.shape(loss.detach(), out.detach())
        self.logs["same"] = self.logged
        return loss


def history(execution: Execution, shape: Callable[[Tensor, Tensor], Any]) -> list[Any]:
    torch.manual_seed(0)
    model, trainer = nn.Linear(4, 2), Trainer(shape)
    optimizer, kept = torch.optim.SGD(model.parameters(), 0.1), list[Any]()
    plan = Plan(execution=execution)
    with (
        emulated_graphs(),
        PlannedStep(model, trainer.loss, optimizer, plan, device="cpu") as step,
    ):
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * number))
            kept += [trainer.logged, trainer.logs["same"]]
    return kept


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("execution", ["graph"])
def test_a_history_of_what_was_logged_is_that_of_eager_steps(
    name: str, execution: Execution
) -> None:
    found, wanted = (history(one, SHAPES[name]) for one in (execution, "eager"))
    for mine, plain in zip(found, wanted, strict=True):
        assert type(mine) is type(plain)
        torch.testing.assert_close(leaves(mine), leaves(plain), rtol=0, atol=0)


def leaves(value: Any) -> list[Any]:
    return pytree.tree_leaves([value.loss, value.inner] if isinstance(value, Logged) else value)


def test_one_tensor_under_two_names_stays_one() -> None:
    class Naming(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.first = self.second = super().forward(x)
            return self.first

    model = Naming(4, 2)
    optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution="graph")
    with (
        emulated_graphs(),
        PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
    ):
        for number in range(NUM_STEPS):
            step(torch.full((3, 4), 0.1 * number))
            assert model.first is model.second
            assert model.first.requires_grad


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_what_a_replayed_model_shows_may_be_kept() -> None:
    class Showing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.shown = out.detach()
            return out

    kept = []
    for execution in ("model-graph", "eager"):
        torch.manual_seed(0)
        model = Showing(4, 2)
        optimizer, plan = torch.optim.SGD(model.parameters(), 0.1), Plan(execution=execution)
        with (
            emulated_graphs(),
            PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
        ):
            shown = []
            for number in range(4):
                step(torch.full((3, 4), 0.1 * number))
                shown.append(model.shown)
        kept.append(shown)
    torch.testing.assert_close(*kept, rtol=0, atol=0)


def test_what_is_handed_from_name_to_name_is_refused() -> None:
    """A replay would leave the older name as it was, step after step."""

    class HandingOn(nn.Linear):
        last: Tensor | None = None
        older: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.older, self.last = self.last, out.detach()
            return out

    model = HandingOn(4, 2)
    model.last = model.older = torch.zeros(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for execution in ("graph", "model-graph"):
        plan = Plan(execution=execution)
        with (
            emulated_graphs(),
            PlannedStep(model, squared, optimizer, plan, device="cpu") as step,
            pytest.raises(ObstacleError, match="got a change of 'older' in Python"),
        ):
            step(torch.ones(3, 4))
