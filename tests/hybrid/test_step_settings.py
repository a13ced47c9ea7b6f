"""A step as one program follows what stands in its optimizer's groups, whoever puts it there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_pairs import STEP_GRAPH, batch_of, make, pair_of, sgd
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.whole_step.rates import ScaledByTensors

pytestmark = pytest.mark.usefixtures("interpreted")


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    """Of one learning rate, a tensor that both groups hold."""
    parts = [model.get_submodule(name).parameters() for name in ("0", "6")]
    groups = [{"params": part} for part in parts]
    return torch.optim.SGD(groups, lr=torch.tensor(0.05))


def test_groups_that_share_a_learning_rate_part() -> None:
    """A rate that one group gets is not the other's."""

    def change(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["lr"] = 0.2

    with pair_of(make, two_groups) as pair:
        pair.train(7, {4: change})
        assert float(pair.program.optimizer.param_groups[1]["lr"]) == pytest.approx(0.05)


def test_a_tensor_that_is_put_back_as_learning_rate() -> None:
    """It has the script's value still, is followed, and so is the number that was there before."""
    rates = {}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        rates[model] = torch.tensor(0.05)
        return torch.optim.SGD(model.parameters(), lr=rates[model])

    def number(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["lr"] = 0.2

    def tensor(step: PlannedStep) -> None:
        rate = rates[step.model]
        assert float(rate) == pytest.approx(0.05)
        step.optimizer.param_groups[0]["lr"] = rate.fill_(0.01)

    with pair_of(make, optimizer) as pair:
        pair.train(9, {4: number, 5: tensor, 7: number})


class Grouped(torch.optim.Optimizer):
    """Divides by what `scale` says, which groups hold in a tensor; and multiplies by the first of a list."""

    def __init__(self, parameters: Any, scale: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__(
            parameters, {"lr": torch.tensor(0.1), "scale": torch.ones(()), "factors": [1.0]}
        )
        self.scale = scale
        for p in self.param_groups[0]["params"]:
            self.state[p]["seen"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            scale = self.scale(group)
            for p in group["params"]:
                p.sub_(p.grad * group["lr"] * group["factors"][0] / scale)


def grouped(scale: Callable[[dict[str, Any]], Any]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: Grouped(model.parameters(), scale)


def test_a_tensor_among_the_settings_that_is_replaced() -> None:
    """The next step has the new one, be it written in place or put there."""

    def put(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["scale"] = torch.tensor(4.0)

    def write(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["scale"].fill_(2.0)

    with pair_of(make, grouped(lambda group: group["scale"])) as pair:
        pair.train(9, {3: write, 4: put})
        assert "compiled again because the optimizer's scale changed" in pair.program.notes


def test_a_list_among_the_settings_that_is_written() -> None:
    """It is the same list, with another number in it."""

    def write(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["factors"][0] = 3.0

    with pair_of(make, grouped(lambda group: group["scale"])) as pair:
        pair.train(8, {4: write})
        assert "compiled again because the optimizer's factors changed" in pair.program.notes


def replaced(group: dict[str, Any]) -> Tensor:
    group["scale"] = group["scale"] + 1
    return group["scale"]


def by_gradient(group: dict[str, Any]) -> Tensor:
    group["scale"] = group["scale"] + group["params"][0].grad.abs().sum()
    return group["scale"]


def fading(group: dict[str, Any]) -> Tensor:
    group["lr"] = group["lr"] * 0.5
    return group["scale"]


def fading_in_place(group: dict[str, Any]) -> Tensor:
    group["lr"].mul_(0.5)
    return group["scale"]


@pytest.mark.parametrize(
    ("scale", "entry"),
    [(replaced, "scale"), (by_gradient, "scale"), (fading, "lr"), (fading_in_place, "lr")],
)
def test_an_optimizer_that_renews_entries_of_its_groups_is_refused(scale: Any, entry: str) -> None:
    """One step of it would look right, and all later ones would have the entry of the first."""
    model = make()
    with PlannedStep(
        model,
        lambda model, batch: model(batch["x"]).square().mean(),
        Grouped(model.parameters(), scale),
        STEP_GRAPH,
        device="cpu",
    ) as step:
        step(batch_of(0))
        with pytest.raises(CaptureError, match=f"entries of its groups as they are, got '{entry}'"):
            step(batch_of(1))
        assert not any(isinstance(v, torch._subclasses.FakeTensor) for v in groups_of(step))


def groups_of(step: PlannedStep) -> list[Any]:
    return [value for group in step.optimizer.param_groups for value in group.values()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("is_turned", [False, True])
def test_what_a_step_writes_into_its_batch(accumulate: int, is_turned: bool) -> None:
    """The script finds it there, also where the program had to be given a copy in another order."""

    def clamping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(batch["x"].clamp_(max=0.25)).square().mean()

    left = []
    for execution in ("eager", "step-graph"):
        model = make(dropout=0.0)
        plan = Plan(execution=execution, accumulate=accumulate)
        with PlannedStep(model, clamping, sgd(model), plan, device="cpu") as step:
            for index in range(4):
                x = batch_of(index)["x"]
                x = x.T.contiguous().T if is_turned and index == 3 else x
                step({"x": x})
            left.append(x)
            counters = step.timeline().counters
    torch.testing.assert_close(*left)
    assert counters.get("eager_steps", 0.0) == 0.0


class Scaled(torch.optim.Optimizer):
    """Hands its learning rate to torch as a number, as optimizers written by hand do; counts nothing."""

    def __init__(self, parameters: Any, update: Callable[..., Any]) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.update = update

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                self.update(p, mean, group["lr"])


UPDATES = {
    "add_": lambda p, m, lr: p.add_(m.sign(), alpha=-lr),
    "sub_": lambda p, m, lr: p.data.sub_(other=m, alpha=lr * 0.5),
    "add": lambda p, m, lr: p.copy_(torch.add(p, m, alpha=-lr)),
    "addcmul_": lambda p, m, lr: p.addcmul_(m, m.abs(), value=-lr),
    "addcdiv_": lambda p, m, lr: p.addcdiv_(m, m.abs().add_(1e-3), value=-lr),
    "addcdiv": lambda p, m, lr: p.copy_(
        torch.addcdiv(p, tensor1=m, tensor2=m.abs() + 1.0, value=-lr)
    ),
    # As Muon does, whose updates are computed in bf16.
    "add_ of bf16": lambda p, m, lr: p.add_(m.bfloat16(), alpha=-lr),
    "addcmul_ of bf16": lambda p, m, lr: p.addcmul_(m.bfloat16(), m.bfloat16(), value=-lr),
    "_foreach_add_ of bf16": lambda p, m, lr: torch._foreach_add_([p], [m.bfloat16()], alpha=-lr),
}


@pytest.mark.parametrize("name", UPDATES)
def test_a_tensor_in_place_of_a_number_rounds_as_it(name: str) -> None:
    """Also where a term has fewer bits than what it is added to: its product is not rounded to these."""
    mean = torch.linspace(-1.0, 1.0, 33)
    by_number, by_tensor = torch.zeros(33), torch.zeros(33)
    UPDATES[name](by_number, mean, 0.0123)
    with ScaledByTensors():
        UPDATES[name](by_tensor, mean, torch.tensor(0.0123))
    torch.testing.assert_close(by_tensor, by_number)


@pytest.mark.parametrize("name", UPDATES)
def test_a_learning_rate_that_is_handed_on_as_a_number(name: str) -> None:
    """It is an input of the program as any other: the schedule goes on."""

    def fade(step: PlannedStep) -> None:
        step.optimizer.param_groups[0]["lr"] *= 0.5

    with pair_of(lambda: make(0.0), lambda m: Scaled(m.parameters(), UPDATES[name])) as pair:
        pair.train(8, {4: fade, 6: fade})
        assert not [note for note in pair.program.notes if "compiled again" in note]


def own_rate(model: nn.Module) -> torch.optim.Optimizer:
    """As Adafactor does that finds its rates itself: its groups have None."""
    optimizer = Scaled(model.parameters(), lambda p, m, _: p.sub_(m * p.norm() * 0.01))
    optimizer.param_groups[0]["lr"] = None
    return optimizer


def test_a_learning_rate_that_is_none_is_left_so(interpreted: None) -> None:
    """The check of a compiled step scales what rates there are; one program has an input for each."""
    with pair_of(lambda: make(0.0), own_rate, plan=Plan(execution="compiled")) as pair:
        pair.train(5, {})
        assert pair.program.optimizer.param_groups[0]["lr"] is None
    with (
        pair_of(lambda: make(0.0), own_rate) as pair,
        pytest.raises(
            CaptureError, match="got group 0 of Scaled with lr=None; put it there, or use"
        ),
    ):
        pair.train(3, {})
