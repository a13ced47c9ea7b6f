"""`expected`: a prediction corrected by its trial lasts as long, in the same order, on the same lanes."""

from itertools import pairwise

import msgspec
from hypothesis import given

from ridgeline.plan import Plan
from ridgeline.planner.trials.expectation import expected
from ridgeline.simulator.step import simulate
from ridgeline.timeline import LANES, Timeline
from strategies import make_machine, make_timeline, make_workload, timelines

TWO = Plan(workers=2, threads=1)


def _tried(predicted: Timeline, factors: dict[str, float], step_ns: int | None = None) -> Timeline:
    """A trial in which the compute lane's frames took other multiples of their time, one after the other."""
    spans, clock = [], 0
    for span in predicted.lane("compute"):
        end = clock + round(span.duration_ns * factors.get(span.name, 1.0))
        spans.append((span.name, "compute", clock, end))
        clock = end
    return make_timeline(spans, workers=predicted.workers, steps_ns=(step_ns or clock,) * 3)


@given(timelines("predicted"), timelines())
def test_the_step_is_exactly_the_trials(predicted: Timeline, trial: Timeline) -> None:
    """Whatever the two timelines, no frame ends after the step that the trial measured."""
    after = expected(predicted, trial)
    assert after.step_ns == trial.step_ns
    assert max(span.end_ns for span in after.spans) <= trial.step_ns
    assert after.origin == "predicted"


@given(timelines("predicted"), timelines())
def test_names_lanes_and_their_order_stay(predicted: Timeline, trial: Timeline) -> None:
    """Every span is there, and on each lane frames follow each other as predicted, without overlap."""
    after = expected(predicted, trial)
    assert [(s.name, s.lane, s.detail) for s in after.spans] == [
        (s.name, s.lane, s.detail) for s in predicted.spans
    ]
    for lane in LANES:
        order = sorted(
            (i for i, s in enumerate(predicted.spans) if s.lane == lane),
            key=lambda i: (predicted.spans[i].start_ns, predicted.spans[i].end_ns),
        )
        for one, other in pairwise(order):
            assert after.spans[one].end_ns <= after.spans[other].start_ns


@given(timelines("predicted"))
def test_without_a_trial_it_is_the_prediction(predicted: Timeline) -> None:
    """Nothing is corrected, and nothing is noted."""
    assert expected(predicted, None) is predicted


@given(timelines("predicted"))
def test_a_trial_as_predicted_changes_no_span(predicted: Timeline) -> None:
    """Frames that took what was predicted stay where they are."""
    extent = max(span.end_ns for span in predicted.spans)
    trial = msgspec.structs.replace(predicted, origin="measured", steps_ns=(max(extent, 1),))
    if extent:
        assert expected(predicted, trial).frames == predicted.frames


def test_frames_that_the_trial_has_last_as_long_as_there() -> None:
    """Frame by frame, not by one factor; communication that it did not record keeps its place in the step."""
    predicted = simulate(make_machine(), make_workload(), TWO)
    trial = _tried(predicted, {"forward": 3.0, "optimizer": 0.5})
    after = expected(predicted, trial)
    assert [(s.name, s.duration_ns) for s in after.lane("compute")] == [
        (s.name, s.duration_ns) for s in trial.lane("compute")
    ]
    for before, moved in zip(
        predicted.lane("communication"), after.lane("communication"), strict=True
    ):
        wanted = before.start_ns * trial.step_ns / predicted.step_ns
        assert abs(moved.start_ns - wanted) <= len(predicted.frames)


def test_without_frames_of_the_trial_all_is_scaled_alike() -> None:
    """Half the step: half of every span, but for rounding."""
    predicted = simulate(make_machine(), make_workload(), Plan())
    half = make_timeline([], steps_ns=(predicted.step_ns // 2,))
    after = expected(predicted, half)
    for before, moved in zip(predicted.spans, after.spans, strict=True):
        assert abs(moved.start_ns - before.start_ns / 2) <= 2
        assert abs(moved.end_ns - before.end_ns / 2) <= 2


def test_operators_stay_in_their_frames() -> None:
    """What the trial cannot see moves with the frame that holds it, and keeps what is known about it."""
    predicted = simulate(make_machine(), make_workload(), TWO)
    after = expected(predicted, _tried(predicted, {"forward": 3.0, "backward/0": 0.25}))
    frames = {s.name: s for s in after.lane("compute")}
    holders = {s.name: s for s in predicted.lane("compute")}
    for before, moved in zip(predicted.spans, after.spans, strict=True):
        assert moved.attributes == before.attributes
        if not before.detail or before.lane != "compute":
            continue
        (holder,) = [
            n
            for n, f in holders.items()
            if f.start_ns <= before.start_ns < f.end_ns and before.end_ns <= f.end_ns
        ]
        assert frames[holder].start_ns <= moved.start_ns
        assert moved.end_ns <= frames[holder].end_ns


def test_frames_of_one_worker_stretch_to_the_slowest() -> None:
    """The trial's step is that of the slowest worker, its frames are worker 0's."""
    predicted = make_timeline(
        [("forward", "compute", 0, 60), ("optimizer", "compute", 60, 100)], origin="predicted"
    )
    trial = make_timeline(
        [("forward", "compute", 0, 30), ("optimizer", "compute", 30, 40)], steps_ns=(80,)
    )
    spans = expected(predicted, trial).frames
    assert [(s.name, s.start_ns, s.end_ns) for s in spans] == [
        ("forward", 0, 60),
        ("optimizer", 60, 80),
    ]


def test_waiting_for_input_that_was_not_predicted_appears() -> None:
    """A frame predicted to take no time lasts as long as it did, and pushes the others behind it."""
    predicted = make_timeline(
        [("input", "host", 0, 0), ("forward", "compute", 0, 100)], origin="predicted"
    )
    trial = make_timeline([("input", "host", 0, 30), ("forward", "compute", 30, 90)])
    spans = expected(predicted, trial).frames
    assert [(s.name, s.start_ns, s.end_ns) for s in spans] == [
        ("input", 0, 30),
        ("forward", 30, 90),
    ]


def test_the_note_gives_both() -> None:
    """And preparing takes what it took in the trial."""
    predicted = make_timeline(
        [("forward", "compute", 0, 183_000_000)],
        origin="predicted",
        counters={"compile_s": 10.0, "peak_memory_bytes": 5.0},
        notes=("assumed",),
    )
    trial = make_timeline([("forward", "compute", 0, 131_000_000)], counters={"compile_s": 2.0})
    after = expected(predicted, trial)
    assert after.notes == (
        "corrected by the trial: 183 ms predicted before, 131 ms measured in the trial",
        "assumed",
    )
    assert after.counters == {"compile_s": 2.0, "peak_memory_bytes": 5.0}


def test_a_trial_in_another_order_does_not_reorder() -> None:
    """Frames stay one after the other, as predicted, even where the trial ran them the other way round."""
    predicted = make_timeline(
        [("a", "compute", 0, 50), ("b", "compute", 50, 100)], origin="predicted"
    )
    trial = make_timeline([("b", "compute", 0, 20), ("a", "compute", 20, 60)])
    spans = expected(predicted, trial).frames
    assert [(s.name, s.start_ns, s.end_ns) for s in spans] == [("a", 20, 60), ("b", 60, 60)]
