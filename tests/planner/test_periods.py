"""Trials of workers that train alone: means over periods, whole or in parts, or predicted shares."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.plan import Plan, Sync
from ridgeline.planner import choose
from ridgeline.planner.exchanges.periods import (
    EXCHANGED_SHARE,
    MOST_KEPT,
    PERIODS,
    PeriodParts,
    Sampling,
    exchange_steps,
    has_exchange,
    over_parts,
    over_periods,
    period_steps,
    sampling,
    with_share,
)
from ridgeline.planner.trials.expectation import expected
from ridgeline.planner.trials.trial_steps import LONGEST_PERIODS_S, measured_steps
from ridgeline.planner.trials.trials import could_win
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import due_fragment, landing_fragment
from ridgeline.timeline import Timeline
from strategies import make_machine, make_timeline, make_workload

MS, MIB = 1_000_000, 1 << 20
FRAMES = [
    ("input", "host", 0, 1),
    ("forward", "compute", 1, 40),
    ("backward", "compute", 40, 90),
    ("optimizer", "compute", 90, 100),
    ("all_reduce/0", "communication", 100, 100),
    ("wait", "compute", 100, 100),
]


def measured(steps_ns: Sequence[int]) -> Timeline:
    """Of steps without exchange the median takes 100 ns."""
    return make_timeline(FRAMES, steps_ns=steps_ns, workers=2, counters={"overhead_ns": 2.0})


def waiting(step: int, sync: Sync, seconds: Sequence[int]) -> int:
    """What a step takes in which fragments take so long to land."""
    options = {name: int(sync.options.get(name, 0)) for name in ("fragments", "delay")}
    landed = landing_fragment(step, sync.every, options["fragments"], options["delay"])
    return 100 + (0 if landed is None else seconds[landed])


@given(st.integers(2, 40), st.integers(0, 30), st.data())
def test_a_whole_period_has_every_exchange_once(every: int, warm: int, data: st.DataObject) -> None:
    """Wherever it begins: the mean is that of a step without exchange and a period's waiting divided."""
    fragments = data.draw(st.integers(1, every))
    delay = data.draw(st.integers(0, every - 1))
    costs = data.draw(st.lists(st.integers(0, 10**6), min_size=fragments, max_size=fragments))
    sync = Sync(every=every, options={"fragments": fragments, "delay": delay})
    count = period_steps(sync, 8, 1e-3, 1e3)
    steps = [waiting(warm + number, sync, costs) for number in range(1, count + 1)]
    found = over_periods(measured(steps), sync)
    periods = found.counters[PERIODS]
    assert len(found.steps_ns) == periods == (count - delay) // every >= 1
    assert set(found.steps_ns) == {100 + sum(costs) // every}
    assert due_fragment(every, every, fragments) == fragments - 1


@given(st.integers(2, 60), st.integers(1, 20), st.data())
def test_parts_of_a_period_tell_what_the_whole_does(
    every: int, alone: int, data: st.DataObject
) -> None:
    """Equal steps and one exchange, whatever share of all bytes it brings: the mean is that of the period."""
    fragments = data.draw(st.integers(1, every))
    delay = data.draw(st.integers(0, every // fragments - 1))
    size_s, beside = data.draw(st.integers(0, 10**6)), data.draw(st.integers(0, 50))
    sync = Sync(every=every, options={"fragments": fragments, "delay": delay})
    steps = [100] * alone + [100, *[100 + beside] * delay]
    steps[-1] += size_s
    found = over_parts(measured(steps), sync, PeriodParts(alone, 1 / fragments))
    assert len(found.steps_ns) == alone
    assert set(found.steps_ns) == {100 + round(fragments * (size_s + delay * beside) / every)}
    assert has_exchange(found, sync)
    assert found.counters[EXCHANGED_SHARE] == 1 / fragments
    cut_off = measured(steps[:-1])
    assert over_parts(cut_off, sync, PeriodParts(alone, 1 / fragments)) is cut_off
    assert not has_exchange(cut_off, sync)


@given(
    st.integers(2, 120), st.integers(1, 8), st.integers(0, 119), st.floats(1e-4, 10.0), st.data()
)
def test_the_shorter_way_to_measure_an_exchange_is_taken(
    every: int, fragments: int, delay: int, step_s: float, data: st.DataObject
) -> None:
    """In parts, unless a whole period has as few steps, exchanges overlap, or it takes too long."""
    sync = Sync(
        every=every, options={"fragments": min(fragments, every), "delay": min(delay, every - 1)}
    )
    least = data.draw(st.integers(1, 100))
    steps, alone = sampling(sync, least, step_s, LONGEST_PERIODS_S)
    whole = period_steps(sync, least, step_s, LONGEST_PERIODS_S)
    others = exchange_steps(sync)
    assert others in (0, sync.options["delay"] + 1)
    if alone:
        assert (steps, alone) == (least + others, least)
        assert steps * step_s <= LONGEST_PERIODS_S
        assert steps <= whole or whole == least
    else:
        assert steps == whole


def test_what_overlaps_is_measured_over_whole_periods() -> None:
    """One exchange on its way with another says nothing of one alone."""
    alone = Sync(every=50, options={"fragments": 4, "delay": 11})
    beside = Sync(every=50, options={"fragments": 4, "delay": 12})
    assert (exchange_steps(alone), exchange_steps(beside)) == (12, 0)
    assert sampling(alone, 8, 0.1, 20.0) == Sampling(20, 8)
    assert sampling(beside, 8, 0.1, 20.0) == Sampling(62, 0)
    assert sampling(Sync(), 8, 0.1, 20.0) == Sampling(8, 0)


@given(st.integers(2, 500), st.integers(0, 60), st.floats(1e-4, 100.0), st.integers(1, 100))
def test_a_trial_covers_whole_periods_where_it_has_time(
    every: int, delay: int, step_s: float, least: int
) -> None:
    """No fewer steps than a median wants, unless all that are kept are fewer; else as many as ever."""
    sync = Sync(every=every, options={"delay": min(delay, every - 1)})
    lead = int(sync.options["delay"])
    steps = period_steps(sync, least, step_s, LONGEST_PERIODS_S)
    has_room = lead + every <= min(MOST_KEPT, int(LONGEST_PERIODS_S / step_s))
    if not has_room:
        assert steps == least
        return
    assert (steps - lead) % every == 0
    assert steps <= MOST_KEPT
    assert steps - lead < least + every
    fits_more = steps + every <= min(MOST_KEPT, int(LONGEST_PERIODS_S / step_s))
    assert steps - lead >= least or not fits_more


def test_steps_that_all_exchange_are_left_alone() -> None:
    """As many are measured as ever, and they stay as they are."""
    timeline = measured([100, 300, 100])
    assert over_periods(timeline, Sync()) is timeline
    assert with_share(timeline, timeline, Sync()) is timeline
    assert measured_steps(2**-4, Sync()) == Sampling(16)
    assert measured_steps(2**-4, Sync(every=50)) == Sampling(17, 16)
    assert measured_steps(2**-4, Sync(every=8)) == Sampling(16)


def test_a_part_of_a_period_tells_nothing_of_an_exchange() -> None:
    """Its steps stay, and get the predicted share, with a note; what whole periods told does not."""
    sync = Sync(every=10)
    predicted = make_timeline(
        [*FRAMES[:4], ("all_reduce/0", "communication", 100, 130), ("wait", "compute", 100, 130)],
        origin="predicted",
        workers=2,
    )
    timeline = measured([100] * 9)
    assert over_periods(timeline, sync) is timeline
    priced = with_share(timeline, predicted, sync)
    assert priced.steps_ns == (130,) * 9
    (note,) = priced.notes
    assert note == (
        "no whole period of 10 steps was tried, nor a whole exchange: each measured step is given the "
        "predicted share of one, 30.0 ns"
    )
    whole = over_periods(measured([100] * 9 + [200]), sync)
    assert whole.steps_ns == (110,)
    assert with_share(whole, predicted, sync) is whole


def test_frames_last_as_long_as_the_step() -> None:
    """The exchange and the wait for it stand for what the median step lacks; computing is expected as it was."""
    sync = Sync(every=10)
    whole = over_periods(measured([100] * 9 + [400]), sync)
    assert whole.step_ns == 130
    assert (whole.named("all_reduce/0").duration_ns, whole.named("wait").duration_ns) == (30, 30)
    assert whole.named("backward") == measured([1]).named("backward")
    assert whole.counters == {"overhead_ns": 2.0, PERIODS: 1.0}
    predicted = msgspec.structs.replace(measured([100]), origin="predicted")
    told = expected(predicted, whole)
    assert told.step_ns == 130
    assert told.named("backward").duration_ns == 50
    assert told.named("all_reduce/0").duration_ns == 30


def test_medians_without_exchange_do_not_decide() -> None:
    """A rhythm whose exchanges are dear is not chosen, though a step without exchange is the fastest of all."""
    machine = make_machine(latency_s=1e-4, bandwidth=5e6)
    workload = make_workload(
        forward=[30 * MS] * 4, backward=[60 * MS] * 4, gradient_bytes=[MIB] * 4
    )
    dear_ns = 100_000 * MS

    def trial(plan: Plan) -> Timeline:
        told = simulate(machine, workload, plan, details=False)
        if plan.sync.every == 1:
            return msgspec.structs.replace(told, origin="measured", steps_ns=(told.step_ns,) * 8)
        alone_ns = told.step_ns - told.total_ns("all_reduce")
        count, alone = measured_steps(alone_ns * 1e-9, plan.sync)
        steps = [alone_ns] * (count - 1) + [alone_ns + dear_ns]
        taken = msgspec.structs.replace(told, origin="measured", steps_ns=tuple(steps))
        if alone:
            return over_parts(taken, plan.sync, PeriodParts(alone, 1.0))
        return over_periods(taken, plan.sync)

    settings = {"world_size": 2, "allow": ("local-steps",), "fixed": {"execution": "eager"}}
    found = choose(machine, workload, trial=trial, **settings)
    assert found.best.plan.sync.every == 1
    assert choose(machine, workload, **settings).best.plan.sync.every > 1
    tried = {c.plan.sync.every for c in found.candidates if c.measured is not None}
    assert len(tried) > 1


def test_what_a_trial_did_not_see_is_told() -> None:
    """In the notes of the choice, behind what the rhythm changes."""
    machine = make_machine(latency_s=1e-4, bandwidth=1e6)
    workload = make_workload(forward=[10**9] * 4, gradient_bytes=[8 * MIB] * 4)

    def trial(plan: Plan) -> Timeline:
        told = simulate(machine, workload, plan, details=False)
        alone_ns = told.step_ns - told.total_ns("wait")
        return msgspec.structs.replace(told, origin="measured", steps_ns=(alone_ns,) * 3)

    settings = {"world_size": 2, "allow": ("local-steps",), "fixed": {"execution": "eager"}}
    found = choose(machine, workload, trial=trial, **settings)
    every = found.best.plan.sync.every
    assert every > 1
    assert found.notes[0].startswith("workers train alone and exchange parameters")
    assert found.notes[1].startswith(
        f"no whole period of {every} steps was tried, nor a whole exchange"
    )
    share_s = found.best.timeline.total_ns("all_reduce") * 1e-9
    assert found.best.step_s == pytest.approx(found.best.timeline.step_ns * 1e-9, rel=1e-6)
    assert share_s > 0.0


@pytest.mark.parametrize(("factor", "tried"), [(1.1, True), (1.5, False)])
def test_what_is_milder_is_tried_while_it_may_be_taken(factor: float, tried: bool) -> None:
    """A longer interval needs a lead, so that what is slower by less gets its trial."""
    alone = Sync(every=8)
    machine = make_machine(latency_s=1e-4, bandwidth=1e12, rate=1e12)
    workload = make_workload(forward=[MS] * 4)
    ranking = choose(machine, workload, world_size=2, fixed={"execution": "eager", "every": 8})
    (apart,) = ranking.candidates
    step_ns = apart.timeline.step_ns
    exact = msgspec.structs.replace(
        apart,
        plan=msgspec.structs.replace(apart.plan, sync=Sync()),
        timeline=msgspec.structs.replace(
            apart.timeline, steps_ns=(round(step_ns * factor / 0.85),)
        ),
    )
    done = msgspec.structs.replace(apart, measured=apart.timeline)
    assert apart.plan.sync == alone
    assert could_win(exact, [done, exact], device="cpu") == tried
