"""Values that a callable only gives on, of its arguments or its own: results have those of the call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.graphs.graph import EAGER_STEPS
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")


class Giving(nn.Module):
    """Beside what it computes it gives what `ask` gets of it; `shared` is its own, and not looked at."""

    def __init__(self, ask: Callable[["Giving"], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.name, self.nothing = 2, "first", None
        self.sizes, self.settings, self.nested = [1, 2], {"rate": 0.5}, (1, (2.0, "x"))
        self.ask = ask

    def forward(self, x: Tensor) -> Any:
        return self.layer(x), self.ask(self)


def _in_cell() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    value = 1

    def change(_: Any) -> None:
        nonlocal value
        value = 2

    return lambda _: value, change


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "number": (lambda m: m.scale, lambda m: setattr(m, "scale", 3)),
    "text": (lambda m: m.name, lambda m: setattr(m, "name", "second")),
    "None": (lambda m: m.nothing, lambda m: setattr(m, "nothing", 4)),
    "zero": (lambda m: m.scale * 0.0, lambda m: setattr(m, "scale", -2)),
    "training": (lambda m: {"is_training": m.training}, lambda m: m.eval()),
    "entry": (lambda m: [m.settings["rate"]], lambda m: m.settings.update(rate=0.1)),
    "dictionary": (lambda m: m.settings, lambda m: m.settings.update(rate=0.1)),
    "key": (lambda m: m.settings, lambda m: (m.settings.clear(), m.settings.update(pace=0.5))),
    "list": (lambda m: m.sizes, lambda m: m.sizes.append(3)),
    "nested": (lambda m: m.nested, lambda m: setattr(m, "nested", ((1, 2.0), "x"))),
    "cell": _in_cell(),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_module_gives_of_its_own_is_that_of_the_call(case: str) -> None:
    """The compiler's code fetches such values anew and does not compare them; a captured program cannot."""
    ask, change = CASES[case]
    module, x = Giving(ask), torch.randn(2, 4)
    with rl.hybridize(module, x, "script") as fast:
        assert repr(fast(x)[1]) == repr(ask(module))
        change(module)
        for _ in range(2):
            result = fast(x)
            torch.testing.assert_close(result[0], module.layer(x).detach())
            assert repr(result[1]) == repr(ask(module))


class Passing(nn.Module):
    """Adds its results to the entries of a batch that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        rest = {key: value for key, value in batch.items() if key != "x"}
        return {"y": self.layer(batch["x"]), **rest}


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, 2), (0.5, 0.25), ("a.png", "b.png"), (True, False), ([1, 2], [3, 4]), (0.0, -0.0)],
)
def test_what_a_batch_brings_along_is_given_back_with_the_result(first: Any, second: Any) -> None:
    x = torch.randn(2, 4)
    with rl.hybridize(Passing(), ({"x": x, "with": first},), "script") as fast:
        for value in (first, second, first):
            assert repr(fast({"x": x, "with": value})["with"]) == repr(value)
        assert fast.report.counters["shapes"] == 2


def test_a_tensor_that_a_module_holds_and_gives_is_refused() -> None:
    """A captured program would give the first one for good, also where the module gets another."""
    module = Giving(lambda m: m.anchors)
    module.anchors = torch.ones(2)
    with pytest.raises(
        CaptureError, match=r"got a tensor of shape \(2,\) that the callable holds itself"
    ):
        rl.hybridize(module, torch.randn(2, 4), "script")


def _other_scale(model: Any) -> None:
    model.scale = 5


def _other_anchors(model: Any) -> None:
    model.anchors = torch.full((4,), 3.0)


def _written_anchors(model: Any) -> None:
    model.anchors.add_(2.0)


@pytest.mark.parametrize("change", [_other_scale, _other_anchors, _written_anchors])
def test_a_loss_gets_what_its_replayed_model_gives_on(change: Callable[[Any], None]) -> None:
    """A weight of the loss, say, that a schedule changes: replays of the model alone gave the first one."""
    found = []
    for execution in ("eager", "model-graph"):
        torch.manual_seed(0)
        model = Giving(lambda m: {"weight": m.scale, "anchors": m.anchors})
        model.anchors = torch.ones(4)
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []

        def weighted(net: nn.Module, batch: Tensor) -> Tensor:
            out, given = net(batch)
            return (out - given["anchors"]).square().mean() * given["weight"]

        plan = Plan(execution=execution)
        with emulated_graphs(), PlannedStep(model, weighted, optimizer, plan, device="cpu") as step:
            for number in range(EAGER_STEPS + 4):
                if number == EAGER_STEPS + 2:
                    change(model)
                losses.append(step(torch.full((2, 4), 0.1 * number)))
        found.append(torch.stack(losses))
    torch.testing.assert_close(*found)
