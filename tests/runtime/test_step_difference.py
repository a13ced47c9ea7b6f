"""A check of a step passes what is rounding, names it, and lets nothing pass that is wrong by one percent."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError, SideEffectError
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.narrow_rounding import move_within_rounding
from ridgeline.runtime.steps.checks.step_difference import (
    SPARED,
    Ends,
    Noise,
    Outcome,
    differences,
    noise_of,
    outcome,
    without_most_moved,
    without_still,
)
from ridgeline.workers.world import World

Loss = Callable[[nn.Module, Any], Tensor]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01),
}


class Backward(torch.autograd.Function):
    """The same values, and gradients that are a factor too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def made() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(8, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.BatchNorm1d(64),
    ]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(64, 4))


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :4]).square().mean()


def in_another_order(model: nn.Module, batch: Tensor) -> Tensor:
    """The same maths from samples in another order: every sum is rounded otherwise."""
    turned = batch.flip(0)
    return (model(turned) - turned[:, :4]).square().mean()


def checked(
    replayed: Loss,
    optimizer: str,
    num_before: int,
    rate: float = 1.0,
    plain: Loss = mean_square,
) -> list[str]:
    """Notes of the check of a step whose loss is another one, and whose learning rate is a multiple.

    It comes after `num_before` steps: with none the optimizer has no state yet.
    """
    model = made()
    made_optimizer = OPTIMIZERS[optimizer](model.parameters())
    world = World.join(device="cpu")
    body, other = (
        StepBody(model, loss, made_optimizer, Plan(), None, clip_norm=None, device=world.device)
        for loss in (plain, replayed)
    )
    batch = torch.randn(64, 8)
    for _ in range(num_before):
        body(batch, Recorder(HostClock()))
    rates, notes = LearningRates(made_optimizer), list[str]()

    def replay() -> Tensor:
        rates.scale(rate)
        loss = other(batch, Recorder(HostClock()))
        rates.scale(1.0 / rate)
        return loss

    check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    return notes


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rounding_passes_and_is_named(optimizer: str, num_before: int) -> None:
    """Biases before batch norm have gradients of rounding alone, which Adam turns into whole steps."""
    notes = checked(in_another_order, optimizer, num_before)
    assert "equals the eager step within" in notes[-1]
    assert notes[0] == (
        "rounding alone decides the update of 0.bias, 3.bias, so this was not compared"
    )


WRONG: dict[str, Loss] = {
    "factor of the loss": lambda model, batch: 1.01 * in_another_order(model, batch),
    "gradient of a layer": lambda model, batch: (
        (model[6](Backward.apply(model[:6](batch), 1.01)) - batch[:, :4]).square().mean()  # type: ignore[index]
    ),
    "constant of the model": lambda model, batch: (
        (1.01 * model(batch) - batch[:, :4]).square().mean()
    ),
}


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_one_percent_is_caught(wrong: str, optimizer: str, num_before: int) -> None:
    """In the loss, or where only gradients show it; noise beside it hides nothing."""
    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(WRONG[wrong], optimizer, num_before)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_learning_rate_that_is_one_percent_too_high_is_caught(optimizer: str) -> None:
    """The update of all elements shows it that are not rounding."""
    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(in_another_order, optimizer, 2, rate=1.01)


def cast(loss: Loss) -> Loss:
    """The loss as people write it who cast by themselves."""

    def inside(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return inside


def in_other_kernels(model: nn.Module, batch: Tensor) -> Tensor:
    """The same maths with each sum in two parts, as fused kernels round at other places."""
    hidden = batch
    for layer in model:
        if isinstance(layer, nn.Linear):
            half = layer.in_features // 2
            first = nn.functional.linear(hidden[:, :half], layer.weight[:, :half], layer.bias)
            hidden = first + nn.functional.linear(hidden[:, half:], layer.weight[:, half:])
        else:
            hidden = layer(hidden)
    return (hidden - batch[:, :4]).square().mean()


def test_rounding_to_16_bits_by_the_users_own_code_passes() -> None:
    """As far as a cast moves the step itself; the note says how far that is."""
    notes = checked(cast(in_other_kernels), "adam", 2, plain=cast(mean_square))
    assert "equals the eager step (which rounding to 16 bits moves by " in notes[-1]


def test_what_moves_the_furthest_is_left_out_however_it_lies_in_memory() -> None:
    """A parameter may be transposed: the same elements are left out."""
    generator = torch.Generator().manual_seed(0)
    start, moved = (torch.randn(8, 12, generator=generator) for _ in range(2))
    masks = []
    for new in (start, start.t().contiguous().t()):
        wanted, other = (Outcome(0.0, [value], [[]]) for value in (new, moved))
        masks += without_most_moved(wanted, [other], None).masks
    assert int(masks[0].sum()) == start.numel() // SPARED
    assert torch.equal(*masks)


def test_what_rounding_to_16_bits_does_not_explain_is_caught() -> None:
    """A loss of twice the size, in the same 16 bits; and the same difference in 32."""

    def twice(model: nn.Module, batch: Tensor) -> Tensor:
        return 2.0 * in_other_kernels(model, batch)

    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(cast(twice), "adam", 2, plain=cast(mean_square))
    with pytest.raises(EquivalenceError, match=r"within 0\.008 of the update"):
        checked(cast(mean_square), "sgd", 2)


@given(st.sampled_from([2.0**-9, 2.0**-12]), st.integers(0, 100))
def test_parameters_move_within_what_a_cast_rounds_away(half_step: float, seed: int) -> None:
    """Each by another part, the same for the same seed; the random state stays."""
    layers = [nn.Linear(8, 8) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in layers[1].state_dict().items()}
    state = torch.get_rng_state()
    for layer in layers:
        move_within_rounding(layer.parameters(), half_step, seed)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(layers[0].weight, layers[1].weight)
    assert torch.equal(layers[0].bias, before["bias"])
    moved = (layers[1].weight - before["weight"]).abs() / before["weight"].abs()
    assert 0.5 * half_step < moved.max() <= half_step * 1.001
    assert moved.unique().numel() > 8


def test_what_moves_the_furthest_is_found_however_a_parameter_lies() -> None:
    """A transposed weight has the same element masked as one that is laid out in rows."""
    rows, moves = torch.zeros(8, 4), torch.arange(32.0).view(8, 4)
    masks = []
    for weight in (rows, rows.t().contiguous().t()):
        others = [Outcome(0.0, [weight + moves], [[]]), Outcome(0.0, [weight - moves / 2], [[]])]
        masks += without_most_moved(Outcome(0.0, [weight], [[]]), others, None).masks
    assert masks[0].nonzero().tolist() == [[7, 2], [7, 3]]
    assert torch.equal(*masks)


def unordered(model: nn.Module, batch: Tensor) -> Tensor:
    """The same loss, whose gradients of biases before batch norm are noise: sums that add in no order."""
    noise = SystemRandom().gauss(0.0, 1e-7) * sum(
        layer.bias.sum() for layer in (model[0], model[3])
    )
    return mean_square(model, batch) + noise - noise.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_noise_of_the_eager_step_itself_hides_nothing(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What differs between two eager steps is left out by name; the rest is held to the tolerance."""
    monkeypatch.setattr(SystemRandom, "gauss", Random(0).gauss)  # the same noise in each run
    for _ in range(5):
        notes = checked(unordered, optimizer, 0, plain=unordered)
        assert "equals the eager step" in notes[-1]
    with pytest.raises(EquivalenceError):
        checked(unordered, optimizer, 0, rate=1.05, plain=unordered)


def test_noise_may_come_near_to_itself_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first runs of the step as written leave alike what is noise: more of them tell."""
    first = [1.0, 3.0, 1.05, 1.05, 1.05]  # as written, in the mode, as written again and nudged
    values = itertools.chain(first, itertools.cycle([0.5, 2.5, 1.5]))
    monkeypatch.setattr(SystemRandom, "gauss", lambda *_: 1e-6 * next(values))
    notes = checked(unordered, "rmsprop", 0, plain=unordered)
    assert "equals the eager step" in notes[-1]


def test_a_step_that_cannot_be_run_again_is_not_checked(tmp_path: Path) -> None:
    """A counter has not gone on, and nothing was written."""
    counts, path = itertools.count(), tmp_path / "log"

    def counting(model: nn.Module, batch: Tensor) -> Tensor:
        return mean_square(model, batch) / (1 + next(counts))

    def writing(model: nn.Module, batch: Tensor) -> Tensor:
        path.write_text("here")
        return mean_square(model, batch)

    with pytest.raises(SideEffectError, match=r"got counts \(a count\) within its reach"):
        checked(counting, "sgd", 0, plain=counting)
    assert next(counts) == 0
    with pytest.raises(SideEffectError, match=r"got open of '.*log' \(test_step_difference"):
        checked(writing, "sgd", 0, plain=writing)
    assert not path.exists()


def test_no_rounding_makes_a_parameter_no_number() -> None:
    """It is infinitely far away, though its update is nothing but rounding, and left out."""
    before, wanted, got = (
        Outcome(1.0, [torch.full((4,), value)], [[]]) for value in (0.0, 1.0, math.nan)
    )
    rounding = Noise([torch.ones(4, dtype=torch.bool)], [], [4])
    assert differences(Ends(before, wanted, wanted), rounding) == [0.0, 0.0]
    assert differences(Ends(before, wanted, got), rounding) == [0.0, math.inf]
    assert differences(Ends(before, got, got), rounding) == [0.0, 0.0]


def leaving_a_bias(amount: float) -> Loss:
    """Of the last bias the gradient is this number in each element."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        last: Any = model[6]  # type: ignore[index]
        found = nn.functional.linear(model[:6](batch), last.weight, last.bias.detach())  # type: ignore[index]
        return (found - batch[:, :4]).square().mean() + amount * last.bias.sum()

    return loss


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gradient_of_nothing_may_be_next_to_nothing(optimizer: str) -> None:
    """Adam makes whole steps of it, by which eager parameters that stay where they are would tell nothing."""
    notes = checked(leaving_a_bias(1e-9), optimizer, 0, plain=leaving_a_bias(0.0))
    if optimizer != "sgd":
        assert "6.bias, so this was not compared" in notes[0]
    with pytest.raises(EquivalenceError, match="something in the step is baked in"):
        checked(leaving_a_bias(1e-2), optimizer, 0, plain=leaving_a_bias(0.0))


@given(st.floats(-9.0, 0.0), st.booleans(), st.booleans())
def test_what_stands_still_is_rounding_where_all_else_is_a_million_times_larger(
    exponent: float, moves: bool, keeps: bool
) -> None:
    """It must not move in the reference, nor may the optimizer keep anything of its gradient there."""
    zero, one = torch.zeros(4), torch.ones(4)
    before = Outcome(1.0, [zero, zero], [[], []])
    wanted = Outcome(1.0, [one * moves, one], [[one * 1e-9 * keeps], [one]])
    got = wanted._replace(parameters=[one, one], state=[[one * 10.0**exponent], [one]])
    noise = noise_of(before, wanted, [wanted])
    found = without_still(Ends(before, wanted, got), noise)
    is_rounding = not moves and not keeps and 10.0**exponent <= 1e-6
    assert found.moves == [0.0, math.inf if is_rounding else 0.0, 0.0]
    assert found.is_left_out(0) == is_rounding


def test_sparse_weights_and_momentum_are_compared_as_what_they_stand_for() -> None:
    model = nn.Sequential(nn.Embedding(6, 2, sparse=True), nn.Linear(2, 2))
    model.matrix = nn.Parameter(torch.eye(2).to_sparse())
    optimizer = torch.optim.SGD(model[:2].parameters(), 0.1, momentum=0.9)
    model[1](model[0](torch.tensor([1, 3]))).sum().backward()
    begun = outcome(0.0, model, optimizer, {})
    optimizer.step()
    wanted = outcome(1.0, model, optimizer, {})
    assert wanted.is_finite()
    assert differences(Ends(begun, wanted, wanted)) == [0.0] * 5
    optimizer.state[model[0].weight]["momentum_buffer"].mul_(2.0)
    got = outcome(1.0, model, optimizer, {})
    assert differences(Ends(begun, wanted, got)) == [0.0, 0.0, pytest.approx(1.0), 0.0, 0.0]
