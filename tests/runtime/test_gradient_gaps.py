"""The check of a mode holds every gradient to what rounding and chance do to it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import EquivalenceError
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan, Precision
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.gradient_gaps import (
    EXACT,
    FEW,
    ROUNDED,
    Moves,
    are_directed,
    gradient_gaps,
    settled,
    worst,
)
from ridgeline.runtime.steps.checks.step_difference import Ends, Outcome
from ridgeline.workers.world import World


class Attending(nn.Module):
    """A layer of a transformer, of whose update Adam makes much of rounding, and keys with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query, self.key, self.value = (nn.Linear(64, 64) for _ in range(3))
        self.last = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        parts = self.query(x), self.key(x), self.value(x)
        return self.last(nn.functional.scaled_dot_product_attention(*parts))


class Convolving(nn.Module):
    """Convolutions and batch norms in a row, whose updates 16 bits move by most of themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(size, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
            for size in (4, 16, 16, 16, 16, 16)
        )
        self.last = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x.view(4, 4, 16, 16))
        for block in self.blocks[1:]:
            y = y + block(y)
        return self.last(y.mean((2, 3)))[:, None].expand(4, 16, 8)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - batch[..., :8]).square().mean()


def check(
    name: str,
    change: Callable[[Tensor], Tensor],
    precision: Precision,
    kind: Callable[[], nn.Module] = Attending,
    *,
    has_stepped: bool = True,
) -> None:
    """Check a step that changes the gradient of one parameter, and is right otherwise."""
    torch.manual_seed(0)
    model = kind()
    # Weights of one take updates that are hardly larger than their last bits.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5)
    world = World.join(device="cpu")
    plan = Plan(precision=precision)
    body = StepBody(model, mean_square, optimizer, plan, None, clip_norm=None, device=world.device)
    batch = torch.randn(4, 16, 64)
    if has_stepped:
        body(batch, Recorder(HostClock()))
    body.plan = Plan(execution="compiled", precision=precision)

    def replay() -> Tensor:
        handle = model.get_parameter(name).register_hook(change)
        try:
            return body(batch, Recorder(HostClock()))
        finally:
            handle.remove()

    check_replay(body, batch, [batch], LearningRates(optimizer), replay, world=world, notes=[])


@pytest.mark.parametrize("precision", ["as-is", "bf16"])
@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5])
@pytest.mark.parametrize("name", ["norm.weight", "query.weight", "value.bias", "last.weight"])
def test_a_wrong_gradient_is_refused(name: str, factor: float, precision: Precision) -> None:
    """Of any parameter, also where its update is mostly rounding; named is what it was compared with."""
    reference = {"as-is": "eager", "bf16": "float32"}[precision]
    wanted = f"wanted execution='compiled' to equal the {reference} step"
    with pytest.raises(EquivalenceError, match=wanted):
        check(name, lambda gradient: gradient * factor, precision)


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5])
@pytest.mark.parametrize("name", ["blocks.0.0.weight", "blocks.3.0.weight"])
def test_a_wrong_gradient_is_refused_whatever_rounding_does_to_others(
    name: str, factor: float
) -> None:
    """The widest rounding of any update allowed as much of each (six of these six cases passed)."""
    with pytest.raises(EquivalenceError, match=f"of the gradient of {name}, got"):
        check(name, lambda gradient: gradient * factor, "bf16", Convolving)


@pytest.mark.parametrize(
    ("factor", "precision"),
    [(0.0, "as-is"), (-1.0, "as-is"), (30.0, "as-is"), (0.0, "bf16"), (-1.0, "bf16")],
)
def test_a_gradient_that_is_rounding_may_be_any(factor: float, precision: Precision) -> None:
    """Softmax takes the bias of keys out again: kernels that add otherwise leave something else of it."""
    check("key.bias", lambda gradient: gradient * factor, precision)


@pytest.mark.parametrize("precision", ["as-is", "bf16"])
def test_the_first_step_is_judged_as_any(precision: Precision) -> None:
    """It makes the optimizer's state, which began as nothing."""
    check("query.weight", lambda gradient: gradient * 1.0, precision, has_stepped=False)
    with pytest.raises(EquivalenceError, match="to equal the eager step within"):
        check("query.weight", lambda gradient: gradient * 1.5, precision, has_stepped=False)


@pytest.mark.parametrize("precision", ["as-is", "bf16"])
def test_rounding_of_gradients_passes(precision: Precision) -> None:
    """To 16 bits, in a plan that computes in 16; by as much as an order of additions in others."""
    rounded = {
        "bf16": lambda gradient: gradient.bfloat16().float(),
        "as-is": lambda gradient: gradient * (1.0 + 2.0**-20),
    }
    check("query.weight", rounded[precision], precision)


def outcome(*states: list[Tensor]) -> Outcome:
    return Outcome(1.0, [torch.zeros(FEW) for _ in states], list(states))


def test_gaps_are_those_of_the_state() -> None:
    """Of each tensor of it; of the parameter where there is none; infinite where some are missing."""
    before = outcome([torch.zeros(4)], [])
    wanted = outcome([torch.ones(4)], [])._replace(parameters=[torch.ones(FEW)] * 2)
    got = outcome([torch.ones(4) * 1.5], [])._replace(parameters=[torch.ones(FEW) * 0.75] * 2)
    assert gradient_gaps(Ends(before, wanted, got)) == [0.5, 0.25]
    assert gradient_gaps(Ends(before, wanted, outcome([], []))) == [math.inf] * 2
    assert gradient_gaps(Ends(outcome([], []), wanted, got)) == [0.5, 0.25]
    lost = outcome([torch.full((4,), math.nan)], [])
    assert gradient_gaps(Ends(before, wanted, lost))[0] == math.inf


def test_each_is_held_to_its_own_rounding() -> None:
    """By its name; few elements may be further apart, and what is rounding alone may be anywhere."""
    many, few = [torch.zeros(FEW)], [torch.zeros(FEW - 1)]
    both = outcome(many, few)
    assert worst([EXACT.floor, 0.0], Moves([0.0, 0.0]), both, EXACT) == (1.0, 0)
    assert worst([0.0, EXACT.floor], Moves([0.0, 0.0]), both, EXACT)[0] < 0.2
    assert worst([0.8, 0.0], Moves([0.1, 0.0]), both, EXACT) == (2.0, 0)
    assert worst([100.0, 0.6], Moves([0.5, 0.0]), both, EXACT) == (2.0, 1)
    assert worst([math.inf, 0.0], Moves([0.5, 0.0]), both, EXACT) == (math.inf, 0)
    assert worst([math.inf, 0.0], Moves([math.inf, 0.0]), both, EXACT) == (math.inf, 0)


@pytest.mark.parametrize("loss", [1.0, 1.002])
def test_what_rounding_was_seen_to_do_leans_to_no_side(loss: float) -> None:
    """Where the last layer saturates, all gradients are larger or smaller at once, and the loss is another."""
    before, wanted, got, other = (
        outcome([torch.full((FEW,), value)]) for value in (0.0, 1.0, 1.1, 0.96)
    )
    got, other = got._replace(loss=loss), other._replace(loss=2.0 - loss)
    found, nothing = gradient_gaps(Ends(before, wanted, got)), Moves([0.0])
    seen = nothing.joined(Ends(before, wanted, other))
    assert seen.gaps == [pytest.approx(0.04)]
    assert seen.loss == pytest.approx(loss - 1.0)
    assert are_directed(Ends(before, wanted, got), found, nothing, EXACT)
    assert not are_directed(Ends(before, wanted, got), found, seen, EXACT)
    worse = outcome([torch.full((FEW,), 1.2)])
    assert are_directed(
        Ends(before, wanted, worse), gradient_gaps(Ends(before, wanted, worse)), seen, EXACT
    )
    lost = got._replace(loss=1.0 + 5.0 * (loss - 1.0) + 0.001)
    assert are_directed(Ends(before, wanted, lost), found, seen, EXACT)


@pytest.mark.parametrize(
    ("turned", "chance", "is_held"),
    [
        (0.06, 0.1, True),
        (0.06, 0.01, False),
        (0.2, 0.1, False),
    ],
)
def test_what_leans_to_no_side_is_held_loosely_once_chance_explains_the_rest(
    turned: float, chance: float, is_held: bool
) -> None:
    """A gradient that is larger as a whole, beside one of which some elements are turned on, and others off."""
    sides = torch.tensor([1.0, -1.0]).repeat(FEW // 2)
    before, wanted, got, other = (
        outcome([torch.full((FEW,), size)], [(1.0 + by * sides) * (size > 0.0)])
        for size, by in ((0.0, 0.0), (1.0, 0.0), (1.2, turned), (1.0 + chance, 0.0))
    )
    chances = iter([Ends(before, wanted, other)])
    size, owner, limit = settled(Ends(before, wanted, got), chances, EXACT, lambda size: size)
    assert (size <= 1.0) == is_held
    assert limit == (ROUNDED if chance == 0.1 else EXACT)
    assert owner == (0 if chance == 0.01 else 1)
