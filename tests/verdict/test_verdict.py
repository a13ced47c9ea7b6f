"""The verdict: parts that add up, errors by frame, and words that claim no more than is known."""

import msgspec
import pytest
from hypothesis import given, settings

from ridgeline.plan import Plan, Sync
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, verify
from ridgeline.verdict.waterfall import divide
from strategies import machines, make_machine, make_timeline, make_workload, timelines, workloads

PARTS = (
    "ideal compute",
    "memory-bound work",
    "kernel inefficiency",
    "launch gaps",
    "exposed communication",
    "input wait",
    "between steps",
    "other",
)
MS = 1_000_000
TWO = Plan(workers=2, threads=1)


def _parts(verdict: Verdict) -> dict[str, int]:
    return {part.name: part.ns for part in verdict.waterfall}


def _measured(predicted: Timeline, factor: float, steps: int = 5, **more: object) -> Timeline:
    """A measured timeline whose every frame took `factor` times as long."""
    spans = tuple(
        msgspec.structs.replace(
            s, start_ns=round(s.start_ns * factor), end_ns=round(s.end_ns * factor)
        )
        for s in predicted.frames
    )
    return msgspec.structs.replace(
        predicted,
        origin="measured",
        spans=spans,
        steps_ns=(max(s.end_ns for s in spans),) * steps,
        notes=(),
        **more,
    )


@given(timelines(), timelines("predicted"))
def test_parts_add_up_to_the_measured_step(measured: Timeline, predicted: Timeline) -> None:
    """Whatever the timelines, the seven parts sum to the step and none is negative."""
    verdict = verify(predicted, measured)
    assert tuple(_parts(verdict)) == PARTS
    assert sum(_parts(verdict).values()) == measured.step_ns
    assert min(_parts(verdict).values()) >= 0


@settings(max_examples=40)
@given(machines, workloads, timelines())
def test_parts_add_up_with_a_prediction(machine, workload, measured: Timeline) -> None:
    """Estimates that exceed what was measured are scaled, so the sum still holds."""
    verdict = verify(simulate(machine, workload, TWO), measured, machine=machine, workload=workload)
    assert sum(_parts(verdict).values()) == measured.step_ns
    assert min(_parts(verdict).values()) >= 0
    assert 0.0 <= (verdict.share_of_ceiling or 0.0) <= 1.0


@given(timelines())
def test_a_timeline_agrees_with_itself(timeline: Timeline) -> None:
    """verify(t, t) has no error anywhere, nothing missing, nothing extra."""
    verdict = verify(timeline, timeline, tolerance=0.0)
    assert verdict.error == 0.0
    assert verdict.passed
    assert verdict.missing == verdict.extra == ()
    assert all(frame.error in (0.0, None) for frame in verdict.frames)
    assert all(lane.error in (0.0, None) for lane in verdict.lanes)


@given(timelines())
def test_the_step_is_divided_without_remainder(timeline: Timeline) -> None:
    """Computing, communicating, waiting and the rest cover the step exactly once."""
    assert sum(divide(timeline)) == timeline.step_ns
    assert min(divide(timeline)) >= 0


def test_division_by_priority() -> None:
    """Computing hides communication beneath it; `wait` is communication; input comes after both."""
    timeline = make_timeline(
        [
            ("input", "host", 0, 10),
            ("forward", "compute", 10, 40),
            ("all_reduce/0", "communication", 30, 60),
            ("wait", "compute", 40, 65),
            ("optimizer", "compute", 65, 80),
        ],
        steps_ns=(90,),
    )
    assert divide(timeline) == (45, 25, 10, 10)


def test_the_waterfall_of_a_prediction() -> None:
    """Ideal, memory, kernels, launches and communication of a step worked out by hand."""
    workload = make_workload(forward=[10_000_000], backward=[10_000_000], optimizer=[1_000_000])
    timings = {
        op.key: seconds for op, seconds in zip(workload.ops, (15e-3, 12e-3, 2e-3), strict=True)
    }
    machine = make_machine(timings=timings, dispatch_s=1e-3)
    predicted = simulate(machine, workload, Plan())
    verdict = verify(predicted, predicted)
    assert _parts(verdict) == {
        "ideal compute": 21_000_000,
        "memory-bound work": 0,
        "kernel inefficiency": 5_000_000,
        "launch gaps": 3_000_000,
        "exposed communication": 0,
        "input wait": 0,
        "between steps": 0,
        "other": 0,
    }
    assert verdict.share_of_ceiling == pytest.approx(21 / 29)


def test_dispatch_is_a_loss_only_beyond_the_limit() -> None:
    """A dispatch that the roofline already covers is not counted twice."""
    workload = make_workload(forward=[MS], backward=[MS], optimizer=[MS])
    machine = make_machine(timings={op.key: 1.2e-3 for op in workload.ops}, dispatch_s=1e-3)
    parts = _parts(verify(*[simulate(machine, workload, Plan())] * 2))
    assert parts["ideal compute"] == 3 * MS
    assert (parts["launch gaps"], parts["kernel inefficiency"]) == (600_000, 0)


def test_launch_gaps_of_a_host_bound_gpu() -> None:
    """What the device waits for launches is in the gaps between its operators."""
    machine = make_machine(device="cuda", dispatch_s=5e-3)
    predicted = simulate(machine, make_workload(device="cuda"), Plan())
    parts = _parts(verify(predicted, predicted))
    assert parts["ideal compute"] == 12_500_000
    assert parts["launch gaps"] == 45_000_000 - 12_500_000


def test_what_the_prediction_does_not_explain_is_other() -> None:
    """A step slower than predicted keeps its estimates; the rest is other."""
    predicted = simulate(make_machine(), make_workload(), Plan())
    verdict = verify(predicted, _measured(predicted, 2.0))
    assert _parts(verdict)["ideal compute"] == 12_500_000
    assert _parts(verdict)["other"] == 12_500_000
    assert verdict.error == pytest.approx(-0.5)
    assert not verdict.passed


def test_slowed_computing_is_told_in_units_for_people() -> None:
    """What communication costs the computing beside it is a reason of `other`, in ms and not in ns."""
    workload = make_workload(backward=[50 * MS] * 2, gradient_bytes=[10_000_000] * 2)
    machine = make_machine(latency_s=0.0, bandwidth=1e9, slowdown=(1.25, 2.0))
    plan = Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(10_000_000,)))
    predicted = simulate(machine, workload, plan)
    other = verify(predicted, predicted).waterfall[-1]
    assert other.why == "4.00 ms of it is computing that communication slows down"
    free = simulate(make_machine(latency_s=0.0, bandwidth=1e9), workload, plan)
    assert verify(free, free).waterfall[-1].why == ""


def test_losses_give_way_before_the_limit() -> None:
    """When less was measured than predicted the losses are scaled first, and the verdict says so."""
    workload = make_workload()
    machine = make_machine(timings={op.key: 2e-3 for op in workload.ops})
    predicted = simulate(machine, workload, Plan())
    verdict = verify(predicted, _measured(predicted, 15 / 18))
    assert _parts(verdict)["ideal compute"] == 12_500_000
    assert _parts(verdict)["kernel inefficiency"] == 2_500_000
    assert verdict.notes[-1] == (
        "predicted losses exceed the measured computing: scaled by 0.45 to fit"
    )


def test_a_step_faster_than_its_limit_is_said_to_be() -> None:
    """A limit above what was measured is scaled and noted: the ceiling was wrong."""
    predicted = simulate(make_machine(), make_workload(), Plan())
    verdict = verify(predicted, _measured(predicted, 0.5))
    assert _parts(verdict)["ideal compute"] == 6_250_000
    assert verdict.notes[-1] == (
        "computing was measured faster than the ceilings allow: the limit was scaled by 0.50"
    )


def test_a_step_far_faster_than_its_limit_has_none() -> None:
    """Ceilings of a machine that was busy say nothing; the step is not said to be at them."""
    predicted = simulate(make_machine(), make_workload(), Plan())
    verdict = verify(predicted, _measured(predicted, 0.2))
    assert _parts(verdict)["ideal compute"] == 0
    assert verdict.share_of_ceiling is None
    assert verdict.notes[-1] == (
        "computing took 2.50 ms where the profile allows no less than 12.5 ms: its ceilings are none, all "
        "computing counts as other; measure again with `ridgeline measure --refresh`"
    )


def test_machine_and_workload_explain_a_prediction_without_operators() -> None:
    """A prediction without details is explained by the price list."""
    machine, workload = make_machine(), make_workload()
    bare = simulate(machine, workload, Plan(), details=False)
    assert verify(bare, bare).share_of_ceiling is None
    assert (
        "it is unknown what limits the operators: all computing counts as other"
        in verify(bare, bare).notes
    )
    verdict = verify(bare, bare, machine=machine, workload=workload)
    assert _parts(verdict)["ideal compute"] == 12_500_000


def test_frames_are_compared_by_name_and_lane() -> None:
    """Missing and extra frames are listed, the others have a signed error."""
    predicted = make_timeline(
        [("forward", "compute", 0, 100), ("wait", "compute", 100, 150)], origin="predicted"
    )
    measured = make_timeline([("forward", "compute", 0, 200), ("input", "host", 0, 10)])
    verdict = verify(predicted, measured)
    assert [(f.name, f.error) for f in verdict.frames if f.error is not None] == [("forward", -0.5)]
    assert [f.name for f in verdict.missing] == ["wait"]
    assert [f.name for f in verdict.extra] == ["input"]
    assert [(x.lane, x.predicted_ns, x.measured_ns) for x in verdict.lanes] == [
        ("host", 0, 10),
        ("compute", 150, 200),
    ]


def test_spread_and_overhead_come_from_the_run() -> None:
    """The spread is that of the quartiles, the overhead that which the run counted."""
    measured = make_timeline(
        [("forward", "compute", 0, 100)],
        steps_ns=(90, 95, 100, 105, 110),
        counters={"overhead_ns": 2.0},
    )
    verdict = verify(measured, measured)
    assert verdict.spread == pytest.approx(0.1)
    assert verdict.overhead_fraction == pytest.approx(0.02)
    assert verify(measured, make_timeline([("a", "compute", 0, 5)])).overhead_fraction is None


@pytest.mark.parametrize(
    ("overhead_ns", "counted", "line"),
    [
        (45_000.0, {}, "Ridgeline's own time: 4.5 % of the step"),
        (45_000.0, {"hidden_overhead": 0.0}, "Ridgeline's own time: 4.5 % of the step"),
        (
            45_000.0,
            {"hidden_overhead": 1.0},
            "Ridgeline's own time: 45.0 us a step on the host, hidden behind the device",
        ),
        (1_000_000.0, {"hidden_overhead": 1.0}, "Ridgeline's own time: 100.0 % of the step"),
    ],
)
def test_hidden_overhead_is_no_part_of_the_step(
    overhead_ns: float, counted: dict, line: str
) -> None:
    """Host work hidden behind the device is told in time; work as long as the step cannot be hidden."""
    counters = {"overhead_ns": overhead_ns, **counted}
    measured = make_timeline([("forward", "compute", 0, MS)], counters=counters)
    verdict = verify(measured, measured)
    assert [x for x in verdict.text.splitlines() if x.startswith("Ridgeline's")] == [line]
    assert verdict.overhead_fraction == overhead_ns / MS


def test_notes_of_the_run_come_first() -> None:
    """What could not be done as planned is read before what was assumed."""
    measured = make_timeline([("forward", "compute", 0, 5)], notes=("ran eagerly",))
    predicted = make_timeline(
        [("forward", "compute", 0, 5)], origin="predicted", notes=("assumed",)
    )
    assert verify(predicted, measured).notes[:2] == ("ran eagerly", "assumed")


@pytest.mark.parametrize(
    ("spans", "head"),
    [
        (
            [("wait", "compute", 0, 90), ("forward", "compute", 90, 100)],
            "COMMUNICATION-BOUND: 90.0 %",
        ),
        ([("input", "host", 0, 90), ("forward", "compute", 90, 100)], "BETWEEN STEPS: 90.0 %"),
        ([("forward", "compute", 0, 100)], "UNEXPLAINED: 100.0 %"),
    ],
)
def test_the_largest_part_names_the_verdict(spans: list, head: str) -> None:
    """The first line says what binds the step and how much of it."""
    timeline = make_timeline(spans)
    assert verify(timeline, timeline).verdict.startswith(head)


@pytest.mark.parametrize(
    ("waited_ns", "head", "advice", "gain"),
    [
        (
            90.0,
            "INPUT-BOUND: 90.0 % of the step is spent waiting for input",
            "prepare input faster or further ahead (more loader workers, a deeper feed)",
            "at most 10.0 x if all of it went away",
        ),
        (
            10.0,
            "BETWEEN STEPS: 80.0 % of the step is spent from a step's end to the next call",
            "do less between steps, or less often: the feed waited for less than that",
            "at most 5.00 x if all of it went away",
        ),
        (
            None,
            "BETWEEN STEPS: 90.0 % of the step is spent from a step's end to the next call",
            (
                "iterate over rl.feed(loader), which measures how long it waits, to separate waiting for "
                "input from code of your own"
            ),
            "no gain is claimed: what passed there was not measured",
        ),
    ],
)
def test_time_between_steps_is_input_where_a_feed_waited(
    waited_ns: float | None, head: str, advice: str, gain: str
) -> None:
    """Nobody but the feed knows who was waited for; and it was measured, however wrong the prediction is."""
    counters = {} if waited_ns is None else {"waited_ns": waited_ns}
    spans = [("input", "host", 0, 90), ("forward", "compute", 90, 100)]
    predicted = make_timeline([("forward", "compute", 0, 3)], origin="predicted")
    verdict = verify(predicted, make_timeline(spans, counters=counters))
    assert verdict.verdict == head
    assert verdict.next == f"{advice}; {gain}"


def test_idle_time_is_told_apart() -> None:
    """It is in no step; nor are other steps of the process, between two of these."""
    spans = [("forward", "compute", 0, 100)]
    idle = {"idle_ns": 12e9, "idle_gaps": 2.0}
    fed = verify(make_timeline(spans), make_timeline(spans, counters=idle | {"waited_ns": 0.0}))
    assert fed.notes[0] == "idle between steps: 12.0 s in 2 gaps, not counted"
    unfed = verify(
        make_timeline(spans),
        make_timeline(spans, counters=idle | {"others_ns": 3e6, "idle_gaps": 1}),
    )
    assert unfed.notes[:2] == (
        (
            "idle between steps: 12.0 s in 1 gap, not counted; rl.feed(loader) measures waiting for batches "
            "separately"
        ),
        "other steps of this process ran between these, 3.00 ms before each, not counted",
    )


def test_compute_and_memory_bound() -> None:
    """What binds computing is told by the operators."""
    predicted = simulate(make_machine(), make_workload(), Plan())
    assert verify(predicted, predicted).verdict == (
        "COMPUTE-BOUND: 100.0 % of the step is computing"
    )
    slow = make_workload(forward=[1], backward=[1] * 4, gradient_bytes=[4 << 20] * 4, optimizer=[1])
    predicted = simulate(make_machine(latency_s=0.0, bandwidth=1e12), slow, TWO)
    assert verify(predicted, predicted).verdict.startswith("MEMORY-BOUND: ")


def test_workers_are_advised_where_there_is_room() -> None:
    """Two workers fill a machine of two cores."""
    machine, workload = make_machine(), make_workload()
    for workers, is_advised in ((1, True), (2, False)):
        timeline = simulate(machine, workload, Plan(workers=workers, threads=1))
        verdict = verify(timeline, timeline, machine=machine, workload=workload)
        assert verdict.verdict.startswith("COMPUTE-BOUND")
        assert ("add workers" in verdict.next) == is_advised


def test_no_gain_is_claimed_within_the_error() -> None:
    """A loss smaller than the prediction error is no promise."""
    spans = [("wait", "compute", 0, 60), ("forward", "compute", 60, 100)]
    measured = make_timeline(spans)
    sure = verify(measured, measured)
    assert sure.next.endswith("at most 2.50 x if all of it went away")
    predicted = make_timeline([("forward", "compute", 0, 300)], origin="predicted")
    unsure = verify(predicted, measured)
    assert unsure.next.endswith(
        "no gain is claimed: 60.0 % of the step is within the uncertainty of 200.0 %"
    )


def test_the_text_fits_eighty_columns() -> None:
    """The verdict prints well: no line above 80 columns, every part in it, ASCII only."""
    machine, workload = make_machine(dispatch_s=1e-4), make_workload(buffer_bytes=64)
    predicted = simulate(machine, workload, TWO)
    verdict = verify(predicted, _measured(predicted, 1.1, counters={"overhead_ns": 1000.0}))
    lines = repr(verdict).splitlines()
    assert max(map(len, lines)) <= 80
    assert repr(verdict).isascii()
    assert all(any(line.startswith(part) for line in lines) for part in PARTS)
    assert lines[0] == verdict.verdict


def test_a_verdict_survives_its_file(tmp_path) -> None:
    """load(save(v)) is v."""
    predicted = simulate(make_machine(), make_workload(), TWO)
    verdict = verify(predicted, _measured(predicted, 1.2))
    assert Verdict.load(verdict.save(tmp_path / "verdict.json")) == verdict
