"""The check of a mode that draws its own random numbers: chance refuses nothing, and hides nothing else."""

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
from ridgeline.workers.world import World


class Averaging(nn.Module):
    """Dropout, and what it decides: an average, which is one number, and statistics; and a count."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(32, 64), nn.Dropout(0.2), nn.Linear(64, 8)
        self.norm = nn.BatchNorm1d(64) if has_norm else nn.Identity()
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("count", torch.zeros(()))
        self.share, self.step_size, self.gain = 0.1, 1.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.drop(self.first(x).relu()))
        with torch.no_grad():
            self.average.lerp_(self.drop(x).square().mean(), self.share)
            self.count.add_(self.step_size)
        return self.last(hidden) * self.gain


class Centred(Averaging):
    """A bias that normalisation takes out again, so that its gradient is nothing but rounding."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__(has_norm)
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        bias = self.first.bias
        rounded = bias + (bias - bias.detach()) * self.noise * self.noise
        hidden = self.drop(self.norm(nn.functional.linear(x, self.first.weight, rounded)).relu())
        return self.last(hidden) * self.gain


class Scattering(Averaging):
    """No random numbers, and sums in no fixed order: twice the same step is 2e-3 apart, in 16 bits 2e-2."""

    def __init__(self, has_norm: bool) -> None:
        super().__init__(has_norm)
        self.rounding = 1.02
        self.order = torch.Generator().manual_seed(0)  # what torch.manual_seed does not set

    def forward(self, x: Tensor) -> Tensor:
        error = 1.0 + 2e-3 * (torch.rand((), generator=self.order) - 0.5)
        if torch.is_autocast_enabled("cpu"):
            error = error * self.rounding
        return self.last(self.first(x).relu()) * error


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :8]).square().mean()


def check(
    seed: int,
    *,
    kind: type[Averaging] = Averaging,
    has_norm: bool = False,
    wrong: Callable[[Averaging], None] | None = None,
    precision: Precision = "as-is",
) -> list[str]:
    """The notes of the check of a step that draws its own numbers, and may do something else."""
    torch.manual_seed(seed)
    model = kind(has_norm)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    world = World.join(device="cpu")
    plan = Plan(precision=precision)
    body = StepBody(model, mean_square, optimizer, plan, None, clip_norm=None, device=world.device)
    batch, notes = torch.randn(64, 32), list[str]()
    body(batch, Recorder(HostClock()))
    body.plan = Plan(execution="compiled", random="compiled", precision=precision)
    seeds, right = iter(range(1000 * seed, 1000 * seed + 100)), dict(vars(model))

    def replay() -> Tensor:
        torch.manual_seed(next(seeds))
        if wrong is not None:
            wrong(model)
        try:
            return body(batch, Recorder(HostClock()))
        finally:
            vars(model).update(right)

    check_replay(body, batch, [batch], LearningRates(optimizer), replay, world=world, notes=notes)
    return notes


@pytest.mark.parametrize("has_norm", [False, True])
def test_a_step_that_draws_other_numbers_passes(has_norm: bool) -> None:
    """Whichever these are, though one number is by chance nearly the same in two draws."""
    for seed in range(6):
        assert "equals the eager step in distribution" in check(seed, has_norm=has_norm)[-1]


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("share", 0.0, "the change of average"),
        ("share", 0.2, "the change of average"),
        ("step_size", 0.0, "the change of count"),
        ("gain", 4.0, "the update"),
    ],
)
def test_what_no_chance_explains_is_refused(name: str, value: float, what: str) -> None:
    """A baked-in number is further away than all draws are."""

    def wrong(model: Averaging) -> None:
        setattr(model, name, value)

    with pytest.raises(EquivalenceError, match=f"of {what}"):
        check(0, wrong=wrong)


def test_rounding_that_other_draws_do_not_explain_is_left_out() -> None:
    """Compiled kernels round elsewhere: where a gradient is rounding, theirs is a hundred times as large."""

    def noisy(model: Averaging) -> None:
        model.noise = 10.0

    notes = check(0, kind=Centred, has_norm=True, wrong=noisy)
    assert "rounding alone decides the update of first.bias, so this was not compared" in notes
    assert "equals the eager step in distribution" in notes[-1]


def test_a_step_that_draws_nothing_is_not_compared_by_draws() -> None:
    """That it differs from itself says little of how far rounding to 16 bits moves it."""

    def rounded_otherwise(model: Averaging) -> None:
        model.rounding = 0.98

    notes = check(0, kind=Scattering, wrong=rounded_otherwise, precision="bf16")
    assert "equals the float32 step" in notes[-1]


def test_what_rounding_does_not_explain_is_refused_by_name_of_its_reference() -> None:
    """The message says what the mode was compared with."""

    def wrong(model: Averaging) -> None:
        model.rounding = 1.2

    wanted = (
        r"wanted execution='compiled' to equal the float32 step \(from which the eager one is \S+ away\) "
        r"within \S+ of the update, got a difference of"
    )
    with pytest.raises(EquivalenceError, match=wanted):
        check(0, kind=Scattering, wrong=wrong, precision="bf16")


def test_what_is_wrong_besides_rounding_is_refused() -> None:
    """Other parameters are held to what chance explains."""

    def wrong(model: Averaging) -> None:
        model.noise, model.gain = 10.0, 4.0

    with pytest.raises(EquivalenceError, match="of the update"):
        check(0, kind=Centred, has_norm=True, wrong=wrong)


def test_what_is_no_number_is_refused_where_rounding_decides() -> None:
    """A gradient that is nothing but rounding is left out as long as it is one."""

    def lost(model: Averaging) -> None:
        model.noise = 1e38

    with pytest.raises(
        EquivalenceError, match="got values that are no numbers, or parameters that one"
    ):
        check(0, kind=Centred, has_norm=True, wrong=lost)


def test_a_step_as_written_that_gives_no_numbers_is_no_reference() -> None:
    """All that differs from it would be allowed."""

    class Lost(Averaging):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float("nan")

    with pytest.raises(
        EquivalenceError, match="wanted a step as written to compare execution='compiled'"
    ):
        check(0, kind=Lost)
