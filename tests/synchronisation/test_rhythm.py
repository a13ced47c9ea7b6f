"""Steps between two exchanges: what may be said of them, when they fall due, and what they cost."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.plan import Plan, Sync
from ridgeline.planner.labels import label
from ridgeline.simulator.curves.scaling import scaling_curve
from ridgeline.simulator.exchange.synchronising import fragment_shares, sent_bytes
from ridgeline.simulator.frames import step_frames
from ridgeline.simulator.memory import peak_memory_bytes
from ridgeline.simulator.pricing.pieces import cut_workload
from ridgeline.simulator.replay import replay
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import (
    check_sync,
    due_fragment,
    fragments_on_their_way,
    landing_fragment,
    state_bytes,
)
from strategies import make_machine, make_workload

MS, MIB = 1_000_000, 1 << 20
NESTEROV = {"outer": "nesterov"}


def planned(every: int, **options: Any) -> Plan:
    return Plan(workers=2, threads=1, sync=Sync(every=every, options=options))


@pytest.mark.parametrize(
    ("sync", "message"),
    [
        (
            {"options": NESTEROV},
            (
                "wanted sync.every > 1 for sync.options['outer'], got every=1 in the plan; raise it, or "
                "leave the option out"
            ),
        ),
        (
            {"every": 4, "options": {"outer": "adam"}},
            (
                "wanted sync.options['outer'] to be one of 'average', 'nesterov', got 'adam' in the plan; "
                "choose one of those"
            ),
        ),
        (
            {"every": 4, "options": {"outer_lr": 0.5}},
            (
                "wanted sync.options['outer']='nesterov' for sync.options['outer_lr'], got 'average' in the "
                "plan; set it, or leave the option out"
            ),
        ),
        (
            {"every": 4, "options": {**NESTEROV, "outer_momentum": 1.5}},
            "wanted sync.options['outer_momentum'] <= 1, got 1.5 in the plan; for example 0.9",
        ),
        (
            {"every": 4, "options": {"fragments": 0}},
            "wanted sync.options['fragments'] >= 1, got 0 in the plan; for example 1",
        ),
        (
            {"every": 4, "options": {"rank": 4}},
            (
                "wanted sync.options to be one of 'held', 'outer', 'fragments', 'delay' with "
                "algorithm='all_reduce' and compression='none', got 'rank' in the plan; leave it out"
            ),
        ),
        (
            {"every": "4", "options": NESTEROV},
            (
                "wanted sync.every > 1 for sync.options['outer'], got every='4' in the plan; raise it, or "
                "leave the option out"
            ),
        ),
        ({"every": 0}, "wanted sync.every >= 1, got 0 in the plan; raise it"),
    ],
)
def test_what_a_plan_may_not_say(sync: dict[str, Any], message: str) -> None:
    """Options are those of the rhythm, and named with what they go with."""
    with pytest.raises(PlanError) as error:
        Plan(workers=2, sync=Sync(**sync))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("sync", "workers", "message"),
    [
        (Sync(every=0), 2, "wanted sync.every >= 1, got 0 in the plan; raise it"),
        (
            Sync(every=4),
            1,
            (
                "wanted sync.every=1 for workers=1, got 4 in the plan; a single worker exchanges nothing: "
                "leave it out, or use more workers"
            ),
        ),
        (
            Sync(every=4, options={"fragments": 5}),
            2,
            (
                "wanted sync.options['fragments'] <= sync.every=4, got 5 in the plan; a step exchanges one "
                "fragment at most: use fewer"
            ),
        ),
        (
            Sync(every=4, options={"delay": 4}),
            2,
            (
                "wanted sync.options['delay'] < sync.every=4, got 4 in the plan; an exchange must be over "
                "before the next one of the same parameters: lower it"
            ),
        ),
        (
            Sync(every=4, algorithm="ring", options={"delay": 1}),
            2,
            (
                "wanted sync.algorithm='all_reduce' for sync.options['delay'], got 'ring' in the plan; that "
                "does not run during steps: leave one of them out"
            ),
        ),
    ],
)
def test_what_does_not_run(sync: Sync, workers: int, message: str) -> None:
    """An interval wants others to exchange with, and a step for each fragment."""
    with pytest.raises(PlanError) as error:
        check_sync(sync, workers, "cpu")
    assert str(error.value) == message


@given(st.integers(1, 40), st.data())
def test_each_fragment_is_due_once_in_a_round(every: int, data: st.DataObject) -> None:
    """In order, in every round alike, the last at its end, and as far apart as whole steps allow."""
    fragments = data.draw(st.integers(1, every))
    due = [due_fragment(step, every, fragments) for step in range(1, 2 * every + 1)]
    first, second = due[:every], due[every:]
    assert first == second
    assert [fragment for fragment in first if fragment is not None] == list(range(fragments))
    assert first[-1] == fragments - 1
    steps = [step for step, fragment in enumerate(due) if fragment is not None]
    lengths = {b - a for a, b in itertools.pairwise(steps)}
    assert lengths <= {every // fragments, -(-every // fragments)}


@given(st.integers(2, 30), st.data())
def test_each_fragment_lands_once_before_it_leaves_again(every: int, data: st.DataObject) -> None:
    """What is on its way after a step is what has left by then and not landed."""
    fragments, delay = data.draw(st.integers(1, every)), data.draw(st.integers(0, every - 1))
    flying: list[int] = []
    for step in range(1, 3 * every + 1):
        if (leaves := due_fragment(step, every, fragments)) is not None:
            assert leaves not in flying
            flying.append(leaves)
        if (lands := landing_fragment(step, every, fragments, delay)) is not None:
            assert flying.pop(0) == lands
        assert fragments_on_their_way(step, every, fragments, delay) == flying


def test_words_for_people() -> None:
    """The interval, with the options that the plan sets."""
    assert ", every 50 steps, buckets" in label(planned(50))
    named = label(planned(50, outer="nesterov", outer_lr=0.5))
    assert ", every 50 steps (outer nesterov, outer_lr 0.5), buckets" in named
    assert not planned(50).exact


def test_a_step_has_its_share_of_the_exchange() -> None:
    """Beside that it is the step of a worker alone; the exchange costs what the collectives do, and the copies."""
    machine = make_machine()
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    alone, apart, often, always = (
        simulate(machine, workload, plan, details=False)
        for plan in (Plan(threads=1), planned(100), planned(10), planned(1))
    )
    spans = {span.name: span for span in often.frames}
    for span in alone.frames:
        assert spans[span.name] == span
    assert alone.step_ns < apart.step_ns < often.step_ns
    assert often.step_ns - alone.step_ns == spans["all_reduce/0"].duration_ns
    tenfold = 10 * (apart.step_ns - alone.step_ns) / (often.step_ns - alone.step_ns)
    assert tenfold == pytest.approx(1.0, rel=1e-4)
    bucket_ns = sum(s.duration_ns for s in always.frames if s.name.startswith("all_reduce/"))
    moved_ns = 1e9 * 8 * 4 * MIB / 1e9  # bytes, at the rate of this machine
    assert spans["all_reduce/0"].duration_ns == pytest.approx((bucket_ns + moved_ns) / 10, rel=1e-3)
    assert any(
        note.startswith("parameters are exchanged every 10 steps, which takes")
        and note.endswith("is given 1/10 of it, while a measured median step has none of it")
        for note in often.notes
    )


def test_steps_of_a_delay_hide_what_travels() -> None:
    """As long as they compute; copies and updates hide behind nothing."""
    machine = make_machine(latency_s=3e-2)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    alone, at_once, one, two, nine = (
        simulate(machine, workload, plan, details=False).step_ns
        for plan in (
            Plan(threads=1),
            planned(10),
            *(planned(10, delay=delay) for delay in (1, 2, 9)),
        )
    )
    computing = (at_once - one) * 10
    assert computing == pytest.approx(alone, rel=0.05)
    assert (one - two) * 10 == pytest.approx(computing, rel=1e-3)
    moved_ns = 1e9 * 8 * 4 * MIB / 1e9
    assert nine - alone == pytest.approx(moved_ns / 10, rel=1e-3)
    parts = simulate(machine, workload, planned(10, delay=1, fragments=2), details=False)
    assert parts.step_ns == two
    assert any("hide behind the 1 steps of the delay" in note for note in parts.notes)


def test_a_delay_hides_no_more_of_a_fragment_than_itself() -> None:
    """A large fragment waits though the steps of the small ones' delays are not used up."""
    machine = make_machine(latency_s=1e-6, bandwidth=6e8)
    whole = {"forward": [MS] * 4, "backward": [MS] * 4}
    plan = planned(10, delay=1, fragments=2)
    even, uneven = (
        simulate(machine, make_workload(**whole, gradient_bytes=sizes), plan, details=False)
        for sizes in (
            [2 * MIB] * 2 + [2 * MIB] * 2,
            [MIB // 2, MIB // 2, MIB // 2, 6 * MIB + MIB // 2],
        )
    )
    shares = fragment_shares(plan.sync, cut_workload(make_workload(**whole), plan.sync))
    assert shares == [0.5, 0.5]
    assert uneven.total_ns("all_reduce") > even.total_ns("all_reduce")


@pytest.mark.parametrize("options", [{}, NESTEROV, {"delay": 3}])
def test_frames_and_replays_agree(options: dict[str, Any]) -> None:
    """A prediction has the frames of `step_frames`, and the clock gives it back to the nanosecond."""
    plan = planned(10, **options)
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    timeline = simulate(make_machine(), workload, plan, details=False)
    frames = step_frames(workers=2, num_buckets=1, sync=plan.sync)
    names = ["input", "forward", "backward", "optimizer", "all_reduce/0", "wait"]
    assert [frame.name for frame in frames] == names
    assert [(s.name, s.lane) for s in timeline.spans] == [(f.name, f.lane) for f in frames]
    assert replay(timeline).spans == timeline.spans


def test_a_worker_alone_is_predicted_without_an_interval() -> None:
    """Curves over numbers of workers begin with one."""
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    first, second = scaling_curve(make_machine(), workload, planned(10, **NESTEROV), (1, 2))
    assert first.step_s * 1e9 == simulate(make_machine(), workload, Plan(threads=1)).step_ns
    assert second.step_s > first.step_s


def test_memory_and_bytes() -> None:
    """What is sent, what is common and the momentum are kept, the last two in single precision at least."""
    assert state_bytes(Sync(), 1000, 4) == 0
    assert state_bytes(Sync(every=4), 1000, 4) == 8000
    assert state_bytes(Sync(every=4, options=NESTEROV), 1000, 4) == 12000
    assert state_bytes(Sync(every=4, options=NESTEROV), 1000, 2) == 10000
    workload = make_workload(backward=[MS] * 4, gradient_bytes=[MIB] * 4)
    more = peak_memory_bytes(workload, planned(4)) - peak_memory_bytes(workload, planned(1))
    assert more == 2 * 4 * MIB
    assert sum(sent_bytes(workload, planned(4))) == 4 * MIB
