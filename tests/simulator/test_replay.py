"""Replays: what was recorded comes back, whatever lay between frames, unless it ran in another order."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.plan import Execution, Plan, Sync
from ridgeline.simulator.replay import Replay, replay, replayed
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict import verify
from strategies import machines, make_machine, make_timeline, make_workload, timelines, workloads

RECORDED = make_timeline(
    [
        ("input", "host", 10, 60),
        ("forward", "compute", 100, 200),
        ("backward/0", "compute", 200, 300),
        ("backward/1", "compute", 300, 400),
        ("all_reduce/0", "communication", 330, 480),
        ("wait", "compute", 400, 500),
        ("optimizer", "compute", 500, 600),
    ],
    workers=2,
    steps_ns=[610],
)
"""Gaps: 10 before input, 40 before forward, 30 before the collective, 20 behind it, 10 at the end."""


def later(timeline: Timeline, at_ns: int, by_ns: int) -> Timeline:
    """As if all had stood still for some time: what ran then took longer, what came then came later."""

    def moved(time_ns: int, *, is_start: bool) -> int:
        return time_ns + by_ns * (time_ns >= at_ns if is_start else time_ns > at_ns)

    spans = tuple(
        msgspec.structs.replace(
            span,
            start_ns=moved(span.start_ns, is_start=True),
            end_ns=max(moved(span.start_ns, is_start=True), moved(span.end_ns, is_start=False)),
        )
        for span in timeline.frames
    )
    end = max(span.end_ns for span in spans)
    return msgspec.structs.replace(timeline, origin="measured", spans=spans, steps_ns=(end,))


def test_a_recorded_step_comes_back() -> None:
    """Frames alone give what they last on the clock; with the gaps between them, the step and every span."""
    again = replay(RECORDED, with_gaps=True)
    assert again.step_ns == RECORDED.step_ns
    spans = {span.name: (span.start_ns, span.end_ns) for span in again.spans}
    assert spans.pop("wait") == (480, 480)
    assert spans == {s.name: (s.start_ns, s.end_ns) for s in RECORDED.frames if s.name != "wait"}
    # 50 + 100 + 100, then 150 of communication, of which 100 are hidden, and 100.
    assert replay(RECORDED).step_ns == 500
    assert replayed(RECORDED) == Replay(
        recorded_ns=610, frames_ns=500, step_ns=610, gap="before forward", gap_ns=40
    )


@settings(max_examples=50)
@given(
    machines,
    workloads,
    st.integers(1, 8 << 20),
    st.lists(st.tuples(st.integers(0, 10**8), st.integers(0, 10**7)), max_size=4),
)
def test_what_kept_its_order_comes_back(machine, workload, limit: int, pauses: list) -> None:
    """Of any predicted step, stopped at any times: within a nanosecond a frame."""
    plan = Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(limit,)))
    recorded = simulate(machine, workload, plan, details=False)
    for at_ns, by_ns in pauses:
        recorded = later(recorded, at_ns, by_ns)
    found = replayed(recorded)
    assert found is not None
    assert found.step_ns == pytest.approx(recorded.step_ns, abs=len(recorded.spans))
    assert found.frames_ns <= found.step_ns + len(recorded.spans)


@given(timelines())
def test_the_clock_is_never_faster_than_the_record(timeline: Timeline) -> None:
    """With its gaps: who began before what it should have waited for is only later.

    An exchange that began before backward is of the step before, which its frames do not tell.
    """
    found = replayed(timeline)
    begins = {span.name: span.start_ns for span in timeline.frames}
    assert (found is None) == (begins["all_reduce/0"] < begins["backward/0"])
    if found is None:
        return
    assert found.frames_ns <= found.step_ns
    assert found.error >= 0.0


@pytest.mark.parametrize(
    ("execution", "sync"),
    [
        ("eager", Sync(every=4)),
        ("eager", Sync(algorithm="sharded", bucket_bytes=(1 << 20,))),
        ("eager", Sync(algorithm="ring", bucket_bytes=(1 << 20,))),
        ("step-graph", Sync()),
    ],
)
def test_every_kind_of_step_comes_back(execution: Execution, sync: Sync) -> None:
    """Exchanges of parameters, divided updates, other algorithms, and one program."""
    workers = 1 if execution == "step-graph" else 2
    device = "cuda" if execution == "step-graph" else "cpu"
    plan = Plan(workers=workers, threads=0, execution=execution, sync=sync)
    timeline = simulate(
        make_machine(device=device), make_workload(device=device), plan, details=False
    )
    found = replayed(timeline)
    assert found is not None
    assert found.frames_ns == pytest.approx(timeline.step_ns, abs=2)
    assert found.step_ns == pytest.approx(timeline.step_ns, abs=2)


def test_a_step_without_its_exchange() -> None:
    """Workers that train alone for some steps: the median step has none, and is all computing."""
    spans = [
        ("input", "host", 0, 10),
        ("forward", "compute", 10, 100),
        ("backward", "compute", 100, 300),
        ("optimizer", "compute", 300, 350),
    ]
    for workers in (1, 2):
        found = replayed(make_timeline(spans, workers=workers))
        assert found == Replay(recorded_ns=350, frames_ns=350, step_ns=350)


def test_sparse_rows_come_back() -> None:
    """Behind all buckets, and gradients that no bucket holds wait for them."""
    spans = [
        *((s.name, s.lane, s.start_ns, s.end_ns) for s in RECORDED.frames[:5]),
        ("sparse_rows", "communication", 480, 700),
        ("wait", "compute", 400, 720),
        ("optimizer", "compute", 720, 800),
    ]
    found = replayed(make_timeline(spans, workers=2))
    assert found is not None
    assert found.step_ns == 800
    assert found.gap_ns == 40


def test_another_order_is_told() -> None:
    """A collective that ran before its bucket was full has no place on the clock: the replay is longer."""
    spans = [
        (s.name, s.lane, *((210, 480) if s.name == "all_reduce/0" else (s.start_ns, s.end_ns)))
        for s in RECORDED.frames
    ]
    measured = make_timeline(spans, workers=2, steps_ns=[610])
    found = replayed(measured)
    assert found is not None
    assert found.step_ns == 610 + 90
    verdict = verify(measured, measured)
    assert verdict.replay == found
    assert verdict.replay_outlook == (
        "the recorded frames on the simulator's clock take 620 ns (+1.6 %), with the gaps between them 700 ns "
        "(+14.8 %); the largest gap is 40.0 ns before forward; they did not run in the order that predictions "
        "assume"
    )


def test_verdicts_say_what_the_clock_makes() -> None:
    """Of measured steps alone: in text, in the terminal, and in the file."""
    verdict = verify(RECORDED, RECORDED)
    assert verdict.replay_outlook == (
        "the recorded frames on the simulator's clock take 500 ns (-18.0 %), with the gaps between them 610 ns "
        "(+0.0 %); the largest gap is 40.0 ns before forward"
    )
    assert "clock the recorded frames on the simulator's clock take 500 ns" in verdict.text
    predicted = msgspec.structs.replace(RECORDED, origin="predicted")
    assert verify(RECORDED, predicted).replay is None
    assert "clock " not in verify(RECORDED, predicted).text
    gapless = make_timeline([("input", "host", 0, 5), ("forward", "compute", 5, 9)])
    assert verify(gapless, gapless).replay_outlook == (
        "the recorded frames on the simulator's clock take 9.00 ns (+0.0 %)"
    )


def test_what_is_no_step_is_not_replayed() -> None:
    """Frames that no step has, or none at all: then nothing tells what waits for what."""
    other = Span(name="mine", lane="compute", start_ns=0, end_ns=5)
    assert replayed(msgspec.structs.replace(RECORDED, spans=(*RECORDED.spans, other))) is None
    assert replayed(make_timeline([], steps_ns=[5])) is None
