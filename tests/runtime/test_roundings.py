"""A step in 16 bits may be as far from the exact one as rounding takes it, of which one run shows one draw."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.checks.equivalence import (
    MOST_ROUNDINGS,
    REORDERED,
    ROUNDING_FACTOR,
    TOLERANCE,
    _Trial,
)
from ridgeline.runtime.steps.checks.perturbed_runs import MOST_NUDGES
from ridgeline.runtime.steps.checks.step_difference import Ends, Outcome
from ridgeline.workers.world import World

CPU = torch.device("cpu")
SIZE = 64


def moved(by: float, start: float = 0.0, size: int = SIZE) -> Outcome:
    """A parameter that the exact step moves by 1, this one by so much more."""
    return Outcome(1.0, [torch.full((size,), start + 1.0 + by)], [[]])


class Runs:
    """Eager steps whose distance from the exact one is `first` here, and `nearby` at other places."""

    def __init__(self, first: float, nearby: list[float], size: int = SIZE) -> None:
        plan = Plan(execution="compiled", precision="bf16")
        self.body = SimpleNamespace(plan=plan, model=nn.Linear(size, 1, bias=False))
        self.world = World(0, 1, 0, CPU)
        self.first, self.nearby, self.num_rounded, self.size = first, nearby, 0, size
        self.further: list[float] = []  # how much further repeated eager steps go

    def eager(self, shift: int) -> Outcome:
        return moved(self.first + (self.further.pop(0) if self.further else 0.0), size=self.size)

    def again(self, shift: int) -> Outcome:
        return self.eager(shift)

    def exact(self, shift: int) -> Outcome:
        return moved(0.0, size=self.size)

    def nudged(self, before: Outcome, shift: int) -> list[Outcome]:
        return [moved(self.first, size=self.size)]

    def rounded(self, shift: int, number: int) -> Ends:
        self.num_rounded += 1
        start = 5.0 + number
        begun = Outcome(0.0, [torch.full((self.size,), start)], [[]])
        ends = moved(0.0, start, self.size), moved(self.nearby[number], start, self.size)
        return Ends(begun, *ends)


@pytest.mark.parametrize(
    ("first", "nearby", "tried", "passes", "num_rounded"),
    [
        (0.006, [], 0.0085, True, 0),  # within 1.5 times the first distance
        (0.001, [0.002, 0.009], 0.012, True, 2),  # the third shows that rounding goes as far
        (0.001, [0.002] * MOST_ROUNDINGS, 0.012, False, MOST_ROUNDINGS),
        (0.006, [0.006] * MOST_ROUNDINGS, 0.02, False, MOST_ROUNDINGS),
    ],
)
def test_as_far_as_rounding_goes(
    first: float, nearby: list[float], tried: float, passes: bool, num_rounded: int
) -> None:
    """Other places are looked at only where the first distance explains too little."""
    runs: Any = Runs(first, nearby)
    before = Outcome(0.0, [torch.zeros(SIZE)], [[]])
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), moved(tried))).update_gap()
    assert (gap.size <= gap.allowed) is passes
    assert gap.size == pytest.approx(tried, rel=1e-3)
    assert gap.allowed >= TOLERANCE
    assert runs.num_rounded == num_rounded


@pytest.mark.parametrize(("nearby", "passes"), [(0.07, True), (0.05, False)])
def test_a_step_that_adds_in_no_fixed_order(nearby: float, passes: bool) -> None:
    """Two eager steps may by chance be nearer to each other than rounding takes either from the exact one."""
    runs: Any = Runs(0.05, [nearby] * MOST_ROUNDINGS)
    before, eager = Outcome(0.0, [torch.zeros(SIZE)], [[]]), runs.eager(0)
    runs.further = [0.0085, 0.0]
    gap = _Trial(runs, [], 0, Ends(before, eager, moved(0.088))).update_gap()
    assert (gap.size <= gap.allowed) is passes
    assert runs.num_rounded == (1 if passes else MOST_ROUNDINGS)


@pytest.mark.parametrize(
    ("size", "num_turned", "passes"),
    [(400, 4, True), (400, 5, False), (399, 4, False), (64, 1, False)],
)
def test_a_few_signs_are_chance(size: int, num_turned: int, passes: bool) -> None:
    """In 16 bits, of an update of equal steps: four elements and one in a hundred, and no more."""
    runs: Any = Runs(0.001, [0.001] * MOST_ROUNDINGS, size)
    before = Outcome(0.0, [torch.zeros(size)], [[]])
    got = moved(0.0, size=size)
    got.parameters[0][:num_turned] *= -1.0
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), got)).update_gap()
    assert (gap.size <= gap.allowed) is passes


class BesideBias(Runs):
    """With a bias in front of a batch norm: nothing moves it but what 16 bits round off."""

    def __init__(self) -> None:
        super().__init__(0.006, [0.006] * MOST_ROUNDINGS)
        self.body.model = nn.Linear(SIZE, 1)

    def eager(self, shift: int) -> Outcome:
        return with_bias(super().eager(shift), 1.0)

    def exact(self, shift: int) -> Outcome:
        return with_bias(super().exact(shift), 1e-3)

    def nudged(self, before: Outcome, shift: int) -> list[Outcome]:
        return [with_bias(one, 1.0) for one in super().nudged(before, shift)]

    def rounded(self, shift: int, number: int) -> Ends:
        pairs = zip(super().rounded(shift, number), (0.0, 1e-3, 1.0), strict=True)
        return Ends(*(with_bias(one, value) for one, value in pairs))


def with_bias(outcome: Outcome, value: float) -> Outcome:
    return Outcome(outcome.loss, [*outcome.parameters, torch.full((1,), value)], [[], []])


@pytest.mark.parametrize(("tried", "passes"), [(0.0085, True), (0.02, False)])
def test_what_rounding_alone_moves_is_left_out(tried: float, passes: bool) -> None:
    """It was refused for a bias that is nothing but rounding; what is wrong beside it was let through."""
    runs: Any = BesideBias()
    before = with_bias(Outcome(0.0, [torch.zeros(SIZE)], [[]]), 0.0)
    notes: list[str] = []
    ends = Ends(before, runs.eager(0), with_bias(moved(tried), 30.0))
    gap = _Trial(runs, notes, 0, ends).update_gap()
    assert (gap.size <= gap.allowed) is passes
    assert notes == ["rounding alone decides the update of bias, so this was not compared"]


def test_signs_do_not_hide_what_is_wrong_elsewhere() -> None:
    """All elements but those that are turned are 2 % too far."""
    runs: Any = Runs(0.001, [0.001] * MOST_ROUNDINGS, 400)
    got = moved(0.02, size=400)
    got.parameters[0][:4] *= -1.0
    before = Outcome(0.0, [torch.zeros(400)], [[]])
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), got)).update_gap()
    assert gap.size == pytest.approx(0.02, rel=1e-2)
    assert gap.size > gap.allowed


@pytest.mark.parametrize(
    ("others", "outliers", "by", "passes"),
    [(19, 1, 0.015, True), (19, 1, 0.017, False), (18, 2, 0.015, False), (18, 1, 0.015, False)],
)
def test_one_parameter_in_twenty_may_be_further(
    monkeypatch: pytest.MonkeyPatch, others: int, outliers: int, by: float, passes: bool
) -> None:
    """By twice what all others may be: of many that are rounded, the worst is further than one draw tells."""
    runs: Any = Runs(0.001, [0.001] * MOST_ROUNDINGS)
    moves = [0.005] * others + [by] * outliers
    count = len(moves)

    def all_moved(outcome: Outcome) -> Outcome:
        return Outcome(outcome.loss, outcome.parameters * count, [[]] * count)

    eager, exact = all_moved(runs.eager(0)), all_moved(runs.exact(0))
    before = Outcome(0.0, [torch.zeros(SIZE)] * count, [[]] * count)
    got = Outcome(1.0, [torch.full((SIZE,), 1.0 + move) for move in moves], [[]] * count)
    runs.body.model = nn.ModuleList(nn.Linear(SIZE, 1, bias=False) for _ in moves)
    rounded = runs.rounded
    monkeypatch.setattr(runs, "rounded", lambda *at: Ends(*map(all_moved, rounded(*at))))
    monkeypatch.setattr(runs, "exact", lambda shift: exact)
    monkeypatch.setattr(runs, "again", lambda shift: eager)
    monkeypatch.setattr(runs, "nudged", lambda before, shift: [eager])
    gap = _Trial(runs, [], 0, Ends(before, eager, got)).update_gap()
    assert (gap.size <= gap.allowed) is passes


@pytest.mark.parametrize(
    ("by", "passes"), [(0.0116, True), (0.02, True), (0.0205, False), (math.nan, False)]
)
def test_the_loss_is_one_number(monkeypatch: pytest.MonkeyPatch, by: float, passes: bool) -> None:
    """Of which five runs say little."""
    runs: Any = Runs(0.001, [0.001] * MOST_ROUNDINGS)
    rounded = runs.rounded

    def with_loss(*at: int) -> Ends:
        ends = rounded(*at)
        return ends._replace(got=ends.got._replace(loss=1.0067))

    monkeypatch.setattr(runs, "rounded", with_loss)
    before = Outcome(0.0, [torch.zeros(SIZE)], [[]])
    got = moved(0.001)._replace(loss=1.0 + by)
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), got)).update_gap()
    assert (gap.size <= gap.allowed) is passes


@pytest.mark.parametrize(
    ("size", "by", "passes"), [(3, 0.012, True), (3, 0.021, False), (32, 0.012, False)]
)
def test_few_elements_may_be_further(size: int, by: float, passes: bool) -> None:
    """A bias of three was 1.7 times as far as the furthest of five runs, and a right step was refused."""
    runs: Any = Runs(0.0067, [0.0067] * MOST_ROUNDINGS, size)
    before = Outcome(0.0, [torch.zeros(size)], [[]])
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), moved(by, size=size))).update_gap()
    assert (gap.size <= gap.allowed) is passes


@given(st.floats(0.0, 0.1), st.floats(0.0, 0.99 * REORDERED), st.booleans())
def test_what_is_as_near_as_reordered_additions_needs_no_exact_step(
    first: float, apart: float, is_beyond: bool
) -> None:
    """It would pass beside that, however far rounding takes the eager step from it."""
    runs: Any = Runs(first, [first] * MOST_ROUNDINGS)
    runs.exact = pytest.fail
    before = Outcome(0.0, [torch.zeros(SIZE)], [[]])
    tried = first + apart if is_beyond else max(0.0, first - apart)
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), moved(tried))).update_gap()
    assert gap.size <= REORDERED
    assert gap.reference == "the eager step"
    assert tried <= max(TOLERANCE, ROUNDING_FACTOR * first) + 1e-9


class Flips(Runs):
    """Exact steps, of which rounding turns single numbers on or off: by so much, from one run on."""

    def __init__(self, by: float, first: int) -> None:
        super().__init__(0.0, [])
        self.body.plan = Plan(execution="compiled")
        self.by, self.first_number, self.num_nudged = by, first, 0

    def nudged_by_chance(self, before: Outcome, shift: int, number: int) -> Outcome:
        self.num_nudged += 1
        return turned(self.by if number >= self.first_number else 0.0)

    def narrowly_moved(self, before: Outcome, shift: int) -> list[Outcome]:
        return []

    def by_chance(self, before: Outcome, eager: Outcome, shift: int, **_: int) -> Any:
        return iter([Ends(before, eager, turned(self.by))])


def turned(by: float) -> Outcome:
    """An update of which each second element is too large, and each other one too small."""
    sides = torch.tensor([1.0, -1.0]).repeat(SIZE // 2)
    return Outcome(1.0, [1.0 + by * sides], [[]])


@pytest.mark.parametrize(
    ("got", "by", "first", "passes", "num_nudged"),
    [
        (turned(0.02), 0.006, 0, True, 1),
        (turned(0.02), 0.006, 3, True, 4),
        (turned(0.02), 0.004, 0, False, MOST_NUDGES),  # four times that is less
        (turned(0.02), 0.0, 0, False, MOST_NUDGES),
        (moved(0.01), 0.006, 0, False, 0),  # a wrong factor: it has a direction
        (moved(0.01)._replace(loss=1.01), 0.006, 0, False, 0),
        (turned(0.02)._replace(loss=1.0002), 0.006, 0, False, 0),
        (turned(0.007), 0.0, 0, True, 0),
    ],
)
def test_what_has_no_direction_may_be_as_far_as_more_runs_go(
    got: Outcome, by: float, first: int, passes: bool, num_nudged: int
) -> None:
    """A ReLU next to zero is on in one run and off in another, which two runs seldom show."""
    runs: Any = Flips(by, first)
    before = Outcome(0.0, [torch.zeros(SIZE)], [[]])
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), got)).update_gap()
    assert (gap.size <= gap.allowed) is passes
    assert runs.num_nudged == num_nudged


@pytest.mark.parametrize(
    ("got", "by", "passes"),
    [
        (turned(0.09), 0.0, True),
        (turned(0.11), 0.0, False),
        (turned(0.11), 0.03, True),
        (turned(0.09)._replace(loss=1.0002), 0.0, False),
        (moved(0.04), 0.0, False),
        (moved(0.02), 0.0, True),
        (turned(math.nan), 0.0, False),
    ],
)
def test_a_gradient_may_be_further_in_no_direction(got: Outcome, by: float, passes: bool) -> None:
    """DenseNet-121 was refused in single precision: one number of its last block was on, or off."""
    runs: Any = Flips(by, 0)
    before = Outcome(0.0, [torch.zeros(SIZE)], [[]])
    gap = _Trial(runs, [], 0, Ends(before, runs.eager(0), got)).gradient_gap()
    assert (gap.size <= gap.allowed) is passes
