"""A check of a step holds what the step writes besides parameters: buffers, averages, teachers."""

import math
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.perturbed_runs import PerturbedRuns
from ridgeline.runtime.steps.checks.step_difference import Outcome, Written, written_apart
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World

Loss = Callable[[nn.Module, Any], Tensor]


class Counting(nn.Module):
    """A layer with statistics, a count, and a tensor of which it keeps the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("most", torch.full((), -torch.inf))
        self.register_buffer("index", torch.zeros(1, dtype=torch.int64))
        self.gain, self.step_size, self.turn = 1.0, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        with torch.no_grad():
            self.count.add_(self.step_size)
            self.most.copy_(torch.maximum(self.most, hidden.max() * self.gain))
            self.index.copy_(hidden.sum(1).argmax() + self.turn)
        return self.last(hidden)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :4]).square().mean()


def checked(
    wrong: Loss, plain: Loss = mean_square, *, capture: Callable[[Any], Any] = lambda _: None
) -> list[str]:
    """Notes of the check of a step whose loss is another one; `capture` comes right before."""
    torch.manual_seed(0)
    model = Counting()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    world = World.join(device="cpu")
    body, other = (
        StepBody(model, loss, optimizer, Plan(), None, clip_norm=None, device=world.device)
        for loss in (plain, wrong)
    )
    batch, notes = torch.randn(64, 8), list[str]()
    body(batch, Recorder(HostClock()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(optimizer)

    def replay() -> Tensor:
        return other(batch, Recorder(HostClock()))

    try:
        rates = LearningRates(optimizer)
        check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    finally:
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name
    return notes


def with_setting(name: str, value: float, path: str = "") -> Loss:
    """The loss where an attribute of the model has another value meanwhile."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        module = model.get_submodule(path)
        kept = getattr(module, name)
        setattr(module, name, value)
        try:
            return mean_square(model, batch)
        finally:
            setattr(module, name, kept)

    return loss


def test_equal_steps_pass() -> None:
    """A maximum that begins at minus infinity is no difference, nor is what a step leaves as it was."""
    assert "equals the eager step within" in checked(mean_square)[-1]


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (with_setting("momentum", 0.101, "norm"), "norm.running_"),
        (with_setting("momentum", 0.0, "norm"), "norm.running_"),
        (with_setting("step_size", 0.0), "count"),
        (with_setting("step_size", 2.0), "count"),
        (with_setting("gain", 1.02), "most"),
        (with_setting("turn", 1), "index"),
    ],
)
def test_a_buffer_that_is_written_otherwise_is_named(wrong: Loss, name: str) -> None:
    """Losses, gradients and parameters are all right; only what evaluation reads later is wrong."""
    with pytest.raises(EquivalenceError, match=f"of the change of {name}"):
        checked(wrong)


def test_an_average_outside_of_the_model_is_held() -> None:
    """The loss keeps a tensor that no module knows."""
    average = torch.zeros(4)

    def averaging(share: float) -> Loss:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            found = model(batch)
            average.lerp_(found.detach().mean(0), share)
            return (found - batch[:, :4] - 0.0 * average).square().mean()

        return loss

    checked(averaging(0.1), averaging(0.1))
    with pytest.raises(
        EquivalenceError, match=r"of the change of tensor \d+ of shape \(4,\) outside"
    ):
        checked(averaging(0.11), averaging(0.1))


def test_a_teacher_is_held() -> None:
    """A network that the loss reads and moves after the model."""
    torch.manual_seed(1)
    teacher = nn.Linear(8, 4).requires_grad_(False)

    def following(share: float) -> Loss:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            teacher.weight.lerp_(model.first.weight[:4].detach(), share)  # type: ignore[union-attr]
            return (model(batch) - teacher(batch)).square().mean()

        return loss

    checked(following(0.1), following(0.1))
    with pytest.raises(EquivalenceError):
        checked(following(0.11), following(0.1))


@pytest.mark.parametrize("more", [{}, {"lock": threading.Lock()}])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_tensor_that_a_step_replaces_is_left_out(more: dict[str, Any], hooked: bool) -> None:
    """A graph writes what it shows where its capture has put it, which eager steps give up.

    Also where it is found in its place again, since a hook of the optimizer leads there.
    """
    captured = torch.zeros(64, 4)
    holder = types.SimpleNamespace(shown=None, **more)

    def showing(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        holder.shown = (found.detach().clone(),)
        return (found - batch[:, :4]).square().mean()

    def replaying(model: nn.Module, batch: Tensor) -> Tensor:
        found = model(batch)
        captured.copy_(found.detach())
        return (found - batch[:, :4]).square().mean()

    def capture(optimizer: torch.optim.Optimizer) -> None:
        holder.shown = (captured,)
        if hooked:
            optimizer.register_step_post_hook(lambda *_: holder)

    checked(replaying, showing, capture=capture)
    assert more or holder.shown[0] is captured


def test_gradients_of_what_is_trained_outside_of_the_model_are_left_out() -> None:
    """They are what the update is made of, and each step makes them anew; a graph where its capture did."""
    torch.manual_seed(0)
    model, proxy = nn.Linear(8, 4), nn.Parameter(torch.ones(4))

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) * proxy - batch[:, :4]).square().mean()

    optimizer = torch.optim.SGD([*model.parameters(), proxy], 0.1)
    world, batch = World.join(device="cpu"), torch.randn(16, 8)
    body = StepBody(model, loss_fn, optimizer, Plan(), None, clip_norm=None, device=world.device)
    body(batch, Recorder(HostClock()))
    captured = proxy.grad

    def replay(weight_of_proxy: float = 1.0) -> Tensor:
        loss = body(batch, Recorder(HostClock()))
        with torch.no_grad():
            proxy.add_(proxy.grad, alpha=0.1 * (1.0 - weight_of_proxy))  # type: ignore[arg-type]
            captured.copy_(proxy.grad)  # type: ignore[union-attr, arg-type]
        proxy.grad = captured
        return loss

    rates, notes = LearningRates(optimizer), list[str]()
    check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    assert "equals the eager step within" in notes[-1]
    body(batch, Recorder(HostClock()))
    captured = proxy.grad
    with pytest.raises(EquivalenceError, match=r"of the change of tensor \d+ of shape \(4,\)"):
        check_replay(body, batch, [batch], rates, lambda: replay(1.1), world=world, notes=notes)


def test_what_chance_decides_is_left_out_by_name() -> None:
    """A buffer that holds noise which no seed of torch sets."""

    def noisy(model: nn.Module, batch: Tensor) -> Tensor:
        loss = mean_square(model, batch)
        with torch.no_grad():
            model.most.random_(generator=torch.Generator().manual_seed(_fresh()))  # type: ignore[union-attr]
        return loss

    notes = checked(noisy, noisy)
    assert notes[0] == (
        "rounding or chance decides what a step writes into most, so this was not compared"
    )


def _fresh() -> int:
    return torch.Generator().seed() % (1 << 31)


def test_a_compiled_program_that_loses_a_count_is_refused_or_right() -> None:
    """Torch's compiler has lost what is added in place to a float64 number on CPUs."""
    torch.manual_seed(0)
    model, batch = Counting(), torch.randn(16, 8)
    step = PlannedStep(
        model,
        mean_square,
        torch.optim.SGD(model.parameters(), 0.1),
        Plan(execution="compiled"),
        device="cpu",
    )
    try:
        for _ in range(3):
            step(batch)
        assert float(model.count) == 3.0
    except EquivalenceError as error:
        assert "of the change of count" in str(error)  # noqa: PT017 - both outcomes are right
    finally:
        step.close()


@pytest.mark.parametrize("wrong", [False, True])
def test_steps_in_single_precision_run_for_what_the_plan_s_own_do_not_explain(
    wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The means of what comes from batch norms are noise, which other last bits show in 16 bits as well."""
    torch.manual_seed(0)
    layers = [
        layer for _ in range(6) for layer in (nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64))
    ]
    model, exact = nn.Sequential(*layers), PerturbedRuns.exact
    called: list[int] = []
    monkeypatch.setattr(PerturbedRuns, "exact", lambda *args: called.append(1) or exact(*args))
    mean, variance = model[-1].running_mean, model[-1].running_var
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    world, batch, plan = World.join(device="cpu"), torch.randn(512, 64), Plan(precision="bf16")

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - batch).square().mean()

    body = StepBody(model, loss_fn, optimizer, plan, None, clip_norm=None, device=world.device)

    def replay() -> Tensor:
        before, loss = [mean.clone(), variance.clone()], body(batch, Recorder(HostClock()))
        mean.lerp_(before[0], 0.5)
        variance.lerp_(before[1], 0.2 if wrong else 0.0)
        return loss

    rates, notes = LearningRates(optimizer), list[str]()
    if wrong:
        with pytest.raises(EquivalenceError, match=r"of the change of 11\.running_var"):
            check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    else:
        check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
        assert notes[0].startswith(
            "rounding or chance decides what a step writes into 11.running_mean"
        )
    assert bool(called) is wrong


@pytest.mark.parametrize("start", [float("nan"), float("inf"), -float("inf")])
def test_what_begins_without_a_number_is_held(start: float) -> None:
    """Minima begin at infinity, what is not measured yet as NaN; neither hides other elements, nor itself."""
    before = torch.tensor([start, 1.0, start], dtype=torch.float64)
    now = torch.tensor([3.0, 5.0, start], dtype=torch.float64)
    for index, wrong, share in (
        (0, 2.5, 0.1),
        (1, 4.5, 0.1),
        (0, start, math.inf),
        (2, 1.0, math.inf),
    ):
        got = now.clone()
        got[index] = wrong
        outcomes = [Outcome(0.0, [], [], {"b": Written(before, value)}) for value in (now, got)]
        assert written_apart(*outcomes)["b"] == pytest.approx(share)
        assert written_apart(outcomes[0], outcomes[0]) == {"b": 0.0}


@given(st.integers(0, 1000), st.floats(1e-6, 1e6), st.floats(0.02, 0.5))
def test_a_gap_is_measured_in_the_change(seed: int, scale: float, share: float) -> None:
    """Whatever the size of the values; none for equal ones, infinite for other shapes."""
    generator = torch.Generator().manual_seed(seed)
    before, change = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(2))
    before, now = scale * before, scale * (before + change)
    wrong = before + (1.0 - share) * (now - before)
    outcomes = [Outcome(0.0, [], [], {"b": Written(before, value)}) for value in (now, wrong)]
    assert written_apart(*outcomes)["b"] == pytest.approx(share, rel=1e-6)
    assert written_apart(outcomes[0], outcomes[0]) == {"b": 0.0}
    assert written_apart(outcomes[0], Outcome(0.0, [], []))["b"] == pytest.approx(1.0)
    other = Outcome(0.0, [], [], {"b": Written(before, now[:3])})
    assert written_apart(outcomes[0], other)["b"] == float("inf")


def test_a_part_beside_a_part_that_is_no_number_counts() -> None:
    """Of a complex number whose other part is NaN in both."""
    before, wanted, got = (torch.tensor([complex(x, float("nan"))]) for x in (0.0, 1.0, 3.0))
    outcomes = [Outcome(0.0, [], [], {"b": Written(before, now)}) for now in (wanted, got)]
    assert written_apart(*outcomes) == {"b": 2.0}
    assert written_apart(outcomes[0], outcomes[0]) == {"b": 0.0}
