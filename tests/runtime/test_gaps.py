"""What of the time between steps counts: waiting that a feed measured, and what comes with every step."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.feeding import batches, making
from ridgeline.plan import Plan
from ridgeline.recording import clocks, gaps, recorder
from ridgeline.recording.gaps import Gaps, StepGap, judge
from ridgeline.runtime.steps import step
from ridgeline.timeline import Timeline

MS = 1_000_000
S = 1000 * MS

times = st.integers(0, 1000 * S)


@st.composite
def some_gaps(draw: st.DrawFn) -> StepGap:
    waited, others, rest = draw(times), draw(times), draw(times)
    return StepGap(waited + others + rest, waited, others, draw(st.booleans()))


steps = st.lists(st.tuples(some_gaps(), times), min_size=1, max_size=12)


def judged(pairs: list[tuple[StepGap, int]]) -> Gaps:
    return judge([gap for gap, _ in pairs], [work for _, work in pairs])


@given(steps)
def test_measured_waiting_is_never_left_out(pairs: list[tuple[StepGap, int]]) -> None:
    """Nor anything that is not there; other steps always are; the rest is, in whole or not at all."""
    found = judged(pairs)
    for (gap, _), cut in zip(pairs, found.cuts_ns, strict=True):
        assert cut in (gap.others_ns, gap.others_ns + gap.rest_ns)
        assert cut <= gap.length_ns - gap.waited_ns
    assert found.idle_ns == sum(found.cuts_ns) - sum(gap.others_ns for gap, _ in pairs)
    assert found.num_idle == sum(
        cut > gap.others_ns for (gap, _), cut in zip(pairs, found.cuts_ns, strict=True)
    )


@given(steps, st.randoms())
def test_the_order_does_not_matter(pairs: list[tuple[StepGap, int]], random: object) -> None:
    """Each gap is judged by all of them."""
    shuffled = list(pairs)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    cuts = sorted(zip(pairs, judged(pairs).cuts_ns, strict=True))
    assert cuts == sorted(zip(shuffled, judged(shuffled).cuts_ns, strict=True))


@given(steps, times)
def test_a_longer_gap_is_idle_where_a_shorter_one_is(
    pairs: list[tuple[StepGap, int]], more: int
) -> None:
    """By the same usual gap and step."""
    usual, work = pairs[0][0].rest_ns, pairs[0][1]
    if gaps.is_idle(more, usual, work):
        assert gaps.is_idle(more + pairs[-1][1], usual, work)


@given(st.lists(st.tuples(st.integers(0, S - 1), times), min_size=1, max_size=12))
def test_short_gaps_count(pairs: list[tuple[int, int]]) -> None:
    """Nobody pauses for less than a second."""
    found = judge([StepGap(length) for length, _ in pairs], [work for _, work in pairs])
    assert found == Gaps((0,) * len(pairs), 0, 0, None, 0)


@given(st.integers(1, 50 * MS), st.integers(21, 10_000), st.integers(3, 20))
def test_an_evaluation_is_idle_between_usual_gaps(work: int, much: int, count: int) -> None:
    """One gap of a second or more, and far longer than the others."""
    long = S + much * work
    usual = [StepGap(min(work, 10 * MS))] * count
    found = judge([*usual, StepGap(long)], [work] * (count + 1))
    assert found == Gaps((*[0] * count, long), long, 1, None, 0)


def test_a_person_at_a_notebook_is_idle_in_every_gap() -> None:
    found = judge([StepGap(60 * S), StepGap(200 * S), StepGap(9 * S)], [15 * MS] * 3)
    assert found.cuts_ns == (60 * S, 200 * S, 9 * S)


def test_a_slow_loader_is_waited_for() -> None:
    """However long, where a feed measured it; and what is of a kind with every step counts without one."""
    fed = [StepGap(60 * S, 60 * S, 0, is_fed=True)] * 3
    assert judge(fed, [15 * MS] * 3) == Gaps((0, 0, 0), 0, 0, 60 * S, 0)
    assert judge([StepGap(400 * MS)] * 3, [15 * MS] * 3).cuts_ns == (0, 0, 0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until it is put forward."""
    now = SimpleNamespace(ns=S)
    fake = SimpleNamespace(perf_counter_ns=lambda: now.ns, perf_counter=lambda: now.ns * 1e-9)
    for module in (clocks, recorder, step, batches):
        monkeypatch.setattr(module, "time", fake)
    return now


def trained(clock: SimpleNamespace, between_ns: list[int], *, others: bool = False) -> Timeline:
    """A step of 10 ms, after gaps of these lengths; the first three are warm-up."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        clock.ns += 10 * MS
        return model(batch).sum()

    def make() -> step.PlannedStep:
        return step.PlannedStep(model, loss_fn, optimizer, Plan(), device="cpu")

    with make() as mine, make() as other:
        for length_ns in between_ns:
            clock.ns += length_ns
            if others:
                other(torch.ones(1, 2))
            mine(torch.ones(1, 2))
        return mine.timeline()


def test_idle_gaps_are_in_no_step(clock: SimpleNamespace) -> None:
    """They are told; the frames of every step fill it."""
    measured = trained(clock, [*[2 * MS] * 8, 30 * S, 2 * MS, 12 * S])
    assert measured.steps_ns == (*[12 * MS] * 5, 10 * MS, 12 * MS, 10 * MS)
    assert measured.counters["idle_ns"] == 42 * S
    assert measured.counters["idle_gaps"] == 2
    assert [(s.name, s.start_ns, s.end_ns) for s in measured.frames] == [
        ("input", 0, 2 * MS),
        ("forward", 2 * MS, 12 * MS),
        ("backward", 12 * MS, 12 * MS),
        ("optimizer", 12 * MS, 12 * MS),
    ]


def test_a_notebook_measures_its_steps(clock: SimpleNamespace) -> None:
    measured = trained(clock, [60 * S] * 6)
    assert measured.steps_ns == (10 * MS,) * 3
    assert [s.duration_ns for s in measured.frames][:2] == [0, 10 * MS]


def test_frames_of_a_failed_step_are_none_of_the_next(clock: SimpleNamespace) -> None:
    """As where a user interrupts a cell of a notebook, and runs it again."""
    mine = recorder.Recorder(clocks.HostClock())
    for fails in (True, True, False):
        clock.ns += 2 * MS
        mine.begin_step(clock.ns)
        mine.mark("forward")
        clock.ns += 10 * MS
        if not fails:
            mine.end_step()
    spans = mine.timeline("steps", 1).spans
    assert [(s.name, s.start_ns, s.end_ns) for s in spans] == [
        ("input", 0, 26 * MS),
        ("forward", 26 * MS, 36 * MS),
    ]


def test_another_step_is_no_part_of_this_one(clock: SimpleNamespace) -> None:
    """As of a generator and a discriminator, trained in turn."""
    measured = trained(clock, [2 * MS] * 6, others=True)
    assert measured.steps_ns == (12 * MS,) * 3
    assert measured.counters["others_ns"] == 10 * MS


def test_a_feed_measures_its_waiting(clock: SimpleNamespace) -> None:
    """In every gap, apart from what the script does there."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Loader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(6):
                clock.ns += 7 * MS
                yield torch.ones(1, 2)

    with step.PlannedStep(model, lambda m, b: m(b).sum(), optimizer, Plan(), device="cpu") as mine:
        for batch in making.feed(Loader(), "cpu", depth=0):
            mine(batch)
            clock.ns += 2 * MS
        measured = mine.timeline()
    assert measured.steps_ns == (9 * MS,) * 3
    assert measured.counters["waited_ns"] == 7 * MS
