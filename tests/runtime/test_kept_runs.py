"""Runs that several comparisons ask for are taken once, and the check finds the same."""

from typing import Any

import pytest
import torch
from test_gradient_gaps import Convolving, mean_square

from ridgeline.errors import EquivalenceError
from ridgeline.optimizers.capturable import LearningRates
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.checks import kept_runs
from ridgeline.runtime.steps.checks.equivalence import check_replay
from ridgeline.runtime.steps.checks.kept_runs import KeptRuns
from ridgeline.runtime.steps.checks.perturbed_runs import PerturbedRuns
from ridgeline.runtime.steps.checks.step_difference import Outcome, Written
from ridgeline.workers.world import World


def outcome(size: int) -> Outcome:
    written = {"mean": Written(torch.zeros(size), torch.zeros(size))}
    return Outcome(1.0, [torch.zeros(size)], [[torch.zeros(size)]], written)


def test_what_fits_is_kept_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, state, and both of what is written count: 16 bytes for each of these elements."""
    monkeypatch.setattr(kept_runs, "MOST_BYTES", 16 * 10)
    kept, asked = KeptRuns(World.join(device="cpu")), list[str]()

    def get(what: str, size: int) -> None:
        kept.get(what, lambda: (asked.append(what), [outcome(size)])[1])

    for what, size in [("a", 6), ("b", 5), ("c", 4), ("a", 6), ("b", 5), ("c", 4)]:
        get(what, size)
    assert asked == ["a", "b", "c", "b"]
    kept.forget()
    get("a", 6)
    assert asked[4:] == ["a"]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The perturbations of all steps that a check has taken."""
    taken, run = list[int](), PerturbedRuns._run

    def counted(self: PerturbedRuns, step: Any, shift: int, **how: Any) -> Outcome:
        taken.append(shift)
        return run(self, step, shift, **how)

    monkeypatch.setattr(PerturbedRuns, "_run", counted)
    return taken


def body_of(model: torch.nn.Module, optimizer: Any, world: World) -> StepBody:
    """A step in 16 bits that is said to be compiled."""
    plan = Plan(precision="bf16")
    body = StepBody(model, mean_square, optimizer, plan, None, clip_norm=None, device=world.device)
    body.plan = Plan(execution="compiled", precision="bf16")
    return body


def checked() -> list[str]:
    """What the check of a step in 16 bits says."""
    torch.manual_seed(0)
    model = Convolving()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    world = World.join(device="cpu")
    body = body_of(model, optimizer, world)
    batch, notes = torch.randn(4, 16, 64), list[str]()

    def replay() -> torch.Tensor:
        # So far from the step as written that the check looks at all that might explain it.
        handle = model.blocks[2].register_forward_hook(lambda _, __, out: out * (1 + 2**-5))
        try:
            return body(batch, Recorder(HostClock()))
        finally:
            handle.remove()

    rates = LearningRates(optimizer)
    with pytest.raises(EquivalenceError) as refused:
        check_replay(body, batch, [batch], rates, replay, world=world, notes=notes)
    return [*notes, str(refused.value)]


def test_the_check_finds_the_same_in_fewer_steps(
    monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    """All runs are seeded, so that one that is kept is the one that would be taken again."""
    told, count = checked(), len(steps)
    monkeypatch.setattr(kept_runs, "MOST_BYTES", 0)
    assert checked() == told
    assert count < 0.8 * (len(steps) - count)


class Averaging(Convolving):
    """Keeps a mean, which rounding moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(out.float().mean() * 0.1)
        return out


@pytest.mark.parametrize(("apart", "are_all_asked"), [(2**-8, False), (1.0, True)])
def test_runs_that_take_longest_are_taken_where_others_explain_too_little(
    monkeypatch: pytest.MonkeyPatch, apart: float, are_all_asked: bool
) -> None:
    """A mean of 16 bits that is off by what these round is explained by the step without them."""
    asked = list[int]()
    moved = PerturbedRuns.narrowly_moved
    monkeypatch.setattr(
        PerturbedRuns,
        "narrowly_moved",
        lambda self, before, shift: (asked.append(shift), moved(self, before, shift))[1],
    )
    torch.manual_seed(0)
    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    world = World.join(device="cpu")
    body = body_of(model, optimizer, world)
    batch = torch.randn(4, 16, 64)

    def replay() -> torch.Tensor:
        loss = body(batch, Recorder(HostClock()))
        model.mean.mul_(1.0 + apart * 1.5)
        return loss

    rates = LearningRates(optimizer)
    try:
        check_replay(body, batch, [batch], rates, replay, world=world, notes=[])
    except EquivalenceError:
        assert are_all_asked
    assert bool(asked) is are_all_asked
