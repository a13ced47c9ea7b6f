"""Optimizers that call the loss themselves, as LBFGS does: trained as a loop of one's own trains them."""

import pytest
import torch
from torch import Tensor, nn, optim

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.errors import CaptureError, PlanError, WorkloadError

STEPS = 4


def loss_fn(model, batch):
    rows, wanted = batch
    return (model(rows) - wanted).square().mean()


def made(dropout: float = 0.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1))
    rows = torch.randn(32, 4)
    return model, (rows, rows.sin().sum(1, keepdim=True))


def by_hand(**settings) -> tuple[list[float], nn.Module]:
    model, batch = made(settings.pop("dropout", 0.0))
    optimizer = optim.LBFGS(model.parameters(), **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    torch.manual_seed(1)
    return [optimizer.step(closure).item() for _ in range(STEPS)], model


@pytest.mark.parametrize("plan", ["auto", rl.Plan()], ids=["auto", "eager"])
@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.5}, {"line_search_fn": "strong_wolfe", "max_iter": 5}, {"lr": 0.1, "dropout": 0.5}],
    ids=["plain", "line search", "dropout"],
)
def test_steps_equal_those_of_a_loop_bit_for_bit(plan, settings) -> None:
    losses, trained = by_hand(**settings)
    settings = dict(settings)
    model, batch = made(settings.pop("dropout", 0.0))
    torch.manual_seed(1)
    with rl.TrainStep(model, loss_fn, optim.LBFGS(model.parameters(), **settings), plan) as step:
        assert [step(batch).item() for _ in range(STEPS)] == losses
        assert {"forward", "backward", "optimizer"} <= {f.name for f in step.timeline().frames}
    for mine, theirs in zip(model.parameters(), trained.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_auto_says_why_it_tries_nothing() -> None:
    model, batch = made()
    lines: list[str] = []
    with rl.TrainStep(
        model, loss_fn, optim.LBFGS(model.parameters()), progress=lines.append
    ) as step:
        step(batch)
        (note,) = step.notes
    assert note == (
        "the step runs as it was written, since LBFGS calls the loss any number of times, so no trial shows "
        "how long a step takes; plan=rl.Plan(execution='compiled') compiles the loss"
    )
    assert lines[-1].endswith(note)


@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@interpreted()
def test_a_compiled_loss_is_called_as_often() -> None:
    losses, _ = by_hand(lr=0.5, max_iter=3)
    model, batch = made()
    optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
    with rl.TrainStep(model, loss_fn, optimizer, rl.Plan(execution="compiled")) as step:
        found = [step(batch).item() for _ in range(STEPS)]
    assert found == pytest.approx(losses, rel=1e-3)
    (state,) = optimizer.state.values()
    assert state["func_evals"] == STEPS * 3


def test_gradients_are_clipped_before_each_evaluation() -> None:
    model, batch = made()
    seen = []
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    original = optimizer._gather_flat_grad
    optimizer._gather_flat_grad = lambda: seen.append(original().norm().item()) or original()
    with rl.TrainStep(model, loss_fn, optimizer, rl.Plan(), clip_norm=1e-3) as step:
        step(batch)
    assert len(seen) == 3
    assert max(seen) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("execution", ["step-graph", "packaged"])
def test_what_makes_one_program_of_the_step_is_refused(execution) -> None:
    model, _ = made()
    with pytest.raises(PlanError) as refused:
        rl.TrainStep(model, loss_fn, optim.LBFGS(model.parameters()), rl.Plan(execution=execution))
    assert str(refused.value) == (
        "wanted execution as one of 'eager', 'compiled', 'regional' for LBFGS, which calls the loss any "
        f"number of times, got {execution!r} in the plan; choose one of those"
    )


def test_several_workers_are_refused() -> None:
    from ridgeline.runtime.steps.body.requirements import check_calls

    model, _ = made()
    with pytest.raises(PlanError) as refused:
        check_calls(optim.LBFGS(model.parameters()), rl.Plan(workers=2))
    assert str(refused.value) == (
        "wanted workers=1 for LBFGS, which decides by its own worker's loss how often it calls it, got 2 in "
        "the plan; train on one worker (--workers 1)"
    )


class Idle(optim.SGD):
    """Takes a closure and never calls it."""

    def step(self, closure) -> None:
        """Do nothing."""


def test_an_optimizer_that_never_calls_the_loss_is_refused() -> None:
    model, batch = made()
    with (
        rl.TrainStep(model, loss_fn, Idle(model.parameters(), 0.1), rl.Plan()) as step,
        pytest.raises(WorkloadError) as refused,
    ):
        step(batch)
    assert str(refused.value) == (
        "wanted an optimizer that calls the loss in each step, got Idle that did not; call closure() in its "
        "step"
    )


class Climbing(optim.SGD):
    """Steps by the gradients at the worst point nearby, as SAM does: twice the gradients, once the closure."""

    def step(self, closure=None) -> None:
        """Climb along the gradients that are there, have them computed again, go back and update."""
        assert closure is not None, "wanted a closure"
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        climbed = [0.05 * p.grad / norm for p in parameters]
        with torch.no_grad():
            torch._foreach_add_(parameters, climbed)
        closure()
        with torch.no_grad():
            torch._foreach_sub_(parameters, climbed)
        super().step()


class Raising(Climbing):
    """The same, with an error of its own."""

    def step(self, closure=None) -> None:
        """Climb, or raise."""
        if closure is None:
            raise RuntimeError("wanted a closure")
        super().step(closure)


class Calling(Climbing):
    """The same, which calls what it is given, whatever that is."""

    def step(self, closure=None) -> None:
        """Have the gradients computed again, and climb."""
        closure()
        super().step(closure)


@pytest.mark.parametrize("plan", ["auto", rl.Plan()], ids=["auto", "eager"])
@pytest.mark.parametrize("kind", [Climbing, Raising, Calling])
def test_one_that_refuses_to_go_without_a_closure_finds_gradients_too(kind, plan) -> None:
    """`step(closure=None)` is called behind `backward`; dropout shows how often the loss is computed."""

    def trained(step) -> list[float]:
        torch.manual_seed(0)
        return [step().item() for _ in range(STEPS)]

    model, batch = made(dropout=0.5)
    optimizer = kind(model.parameters(), 0.1, momentum=0.9)

    def gradients() -> Tensor:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        return loss

    def plain() -> Tensor:
        loss = gradients()
        optimizer.step(gradients)
        return loss

    other, _ = made(dropout=0.5)
    with rl.TrainStep(other, loss_fn, kind(other.parameters(), 0.1, momentum=0.9), plan) as step:
        assert trained(lambda: step(batch)) == trained(plain)
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Around(optim.Optimizer):
    """Holds another optimizer, whose groups have the learning rates."""

    def __init__(self, inner: optim.Optimizer) -> None:
        self.inner = inner
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})

    def step(self, closure=None) -> None:
        """Step the other."""
        self.inner.step()


def test_one_program_wants_learning_rates() -> None:
    """A program takes them as inputs, so that one without would keep what it was when it was captured."""
    model, batch = made()
    optimizer = Around(optim.SGD(model.parameters(), 0.1))
    step = rl.TrainStep(model, loss_fn, optimizer, rl.Plan(execution="step-graph"))
    with step:
        step(batch)  # before the program is made
        with pytest.raises(CaptureError) as refused:
            step(batch)
    assert str(refused.value) == (
        "wanted a learning rate 'lr' in each parameter group, which one program for the whole step takes as "
        "an input, got group 0 of Around without; put it there, or use execution='compiled' or 'eager'"
    )
