"""What runs with several numbers of workers show together."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.codec import decode, encode
from ridgeline.errors import LawError
from ridgeline.plan import Plan, Sync
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict.scaling import scaling
from ridgeline.verdict.scaling_nouns import Law, MeasuredRun, MeasuredScaling
from strategies import make_workload

COUNTS = (1, 2, 4, 8, 16, 32)


def timeline(
    workers: int, *steps_s: float, title: str = "toy", origin: str = "measured"
) -> Timeline:
    steps = tuple(round(1e9 * step_s) for step_s in steps_s)
    span = Span(name="step", lane="compute", start_ns=0, end_ns=steps[0])
    return Timeline(origin=origin, title=title, workers=workers, spans=(span,), steps_ns=steps)


def run_of(workers: int, samples: int, *steps_s: float, **given_: object) -> MeasuredRun:
    title = str(given_.pop("title", "toy"))
    return MeasuredRun(
        f"run{workers}",
        make_workload(samples=samples),
        timeline(workers, *steps_s, title=title),
        **given_,
    )


def strong(
    serial: float, counts: tuple[int, ...] = COUNTS, one_s: float = 1.0
) -> list[MeasuredRun]:
    """Runs that share a batch of 64, as Amdahl's law has them."""
    return [run_of(n, 64 // n, one_s / laws.amdahl(1 - serial, n)) for n in counts]


def weak(serial: float, counts: tuple[int, ...] = COUNTS) -> list[MeasuredRun]:
    """Runs with a batch of 8 each, as Gustafson's law has them."""
    return [run_of(n, 8, n / laws.gustafson(serial, n)) for n in counts]


def law(found: MeasuredScaling, name: str) -> Law:
    return next(one for one in found.laws if one.name == name)


@settings(max_examples=8)
@given(st.floats(0.001, 0.5))
def test_runs_that_share_a_batch_follow_amdahl(serial: float) -> None:
    """Each run reveals the serial part, and so does the law through them."""
    found = scaling(strong(serial))
    assert found.regime == "strong"
    for point in found.points[1:]:
        assert point.serial_fraction == pytest.approx(serial, abs=1e-5)
        assert point.speedup == pytest.approx(laws.amdahl(1 - serial, point.workers), rel=1e-5)
        assert point.efficiency == pytest.approx(point.speedup / point.workers)
    amdahl = law(found, "amdahl")
    assert amdahl.coefficients["serial_fraction"].value == pytest.approx(serial, abs=1e-5)
    assert amdahl.coefficients["limit"].value == pytest.approx(1 / serial, rel=1e-2)
    assert amdahl.rate.value == pytest.approx(64.0, rel=1e-4)
    assert found.notes == ()


@settings(max_examples=8)
@given(st.floats(0.001, 0.5))
def test_runs_with_a_batch_each_follow_gustafson(serial: float) -> None:
    """There the speed-up is that of the work done."""
    found = scaling(weak(serial))
    assert found.regime == "weak"
    assert [point.samples for point in found.points] == [8] * len(COUNTS)
    for point in found.points[1:]:
        assert point.serial_fraction == pytest.approx(serial, abs=1e-6)
    gustafson = law(found, "gustafson")
    assert gustafson.coefficients["serial_fraction"].value == pytest.approx(serial, abs=1e-6)


def test_order_and_files_do_not_matter() -> None:
    """The same runs in any order give the same result, which its file holds whole."""
    found = scaling(strong(0.1), [64])
    assert found == scaling(strong(0.1)[::-1], [64])
    assert decode(MeasuredScaling, encode(found), where="file") == found


def test_steps_that_scatter_make_laws_less_sure() -> None:
    """The interval holds the serial part, and grows with the quartiles of the steps."""
    widths = []
    for scatter in (0.01, 0.1):
        steps = [(n, 1.0 / laws.amdahl(0.9, n)) for n in COUNTS]
        runs = [run_of(n, 64 // n, s * (1 - scatter), s, s * (1 + scatter)) for n, s in steps]
        serial = law(scaling(runs), "amdahl").coefficients["serial_fraction"]
        assert serial.low < 0.1 < serial.high
        widths.append(serial.high - serial.low)
    assert widths[1] > 4 * widths[0]


def test_two_runs_of_one_step_each_have_no_interval() -> None:
    """Two numbers for two coefficients: nothing tells how far off they are. The third law needs three."""
    found = scaling(strong(0.1, (1, 2)))
    assert [one.name for one in found.laws] == ["amdahl"]
    serial = found.laws[0].coefficients["serial_fraction"]
    assert (serial.low, serial.high) == (None, None)


def test_a_limit_may_be_no_number() -> None:
    """Without a serial part nothing ends the speed-up; a file holds that, too."""
    found = scaling(strong(0.0))
    assert law(found, "amdahl").coefficients["limit"].value is None or (
        law(found, "amdahl").coefficients["limit"].value > 1e6
    )
    assert decode(MeasuredScaling, encode(found), where="file") == found


def test_a_break_in_the_curve_is_named() -> None:
    """Eight workers over a slow link are off what the others show; without coherence both laws are one."""
    runs = strong(0.02)
    runs[3] = run_of(8, 8, 0.25)
    notes = scaling(runs).notes
    (note,) = [note for note in notes if note.startswith("run8: ")]
    assert re.match(
        r"run8: (?:amdahl|usl) misses 8 workers by \d\d\.\d %; where a curve breaks, ", note
    )


def test_workers_that_do_less_are_named() -> None:
    """Two workers on the cores of one: no serial part explains it, and it is not a break in a curve."""
    runs = [
        run._replace(plan=Plan(workers=run.measured.workers, threads=2 // run.measured.workers))
        for run in (run_of(1, 64, 0.137), run_of(2, 32, 0.220))
    ]
    found = scaling(runs)
    shared, less = found.notes
    assert shared == (
        "all runs share 2 cores, more workers with fewer threads each: this is how that sharing scales, not "
        "more hardware"
    )
    assert less == (
        "run2: 2 workers do less than 1 worker (291 for 467 samples/s): what they share or exchange costs "
        "more than they add, which is no serial part"
    )
    assert law(found, "amdahl").coefficients["serial_fraction"].value == 1.0


def test_runs_of_the_least_number_are_not_compared_with_each_other() -> None:
    """Two runs of one worker scatter; neither is told to do less than one worker."""
    runs = [run_of(1, 64, 0.100), run_of(1, 64, 0.102), run_of(2, 32, 0.051)]
    assert not [note for note in scaling(runs).notes if "do less than" in note]


def test_four_workers_that_do_less_than_two_are_named() -> None:
    """Where no run has one worker, what counts is the work of the least number, not its share of one."""
    notes = scaling([run_of(2, 32, 0.100), run_of(4, 16, 0.120)]).notes
    (note,) = [note for note in notes if "do less than" in note]
    assert note.startswith("run4: 4 workers do less than 2 workers (533 for 640 samples/s): ")


def test_more_than_all_workers_can_do_is_named() -> None:
    """No law has it; it is not taken for a break in a curve."""
    (note,) = scaling([run_of(1, 32, 0.042), run_of(2, 16, 0.006)]).notes
    assert note == (
        "run2: 2 workers do 7.00 times the work of one, more than there are workers: one of the runs was "
        "disturbed, or a worker's share fits into a cache that the whole does not"
    )


def test_few_points_say_little_of_more_workers() -> None:
    """Beyond the largest run a law says what it says with a warning, unless there are six."""
    (note,) = scaling(strong(0.1, (1, 2, 4)), [2, 8, 16]).notes
    assert note == (
        "laws say little about 8, 16 workers: they are fitted to 3 numbers of workers up to 4, wanted 6; "
        "`ridgeline simulate` predicts from what the links do"
    )
    found = scaling(strong(0.1), [64])
    assert found.notes == ()
    (at,) = law(found, "amdahl").points
    assert at.samples_per_s.value == pytest.approx(64 * laws.amdahl(0.9, 64), rel=1e-4)


def test_what_differs_is_named() -> None:
    """Another way to execute the step, and another machine."""
    runs = [
        run._replace(plan=Plan(execution=execution), fingerprint=place)
        for run, execution, place in zip(
            strong(0.1, (1, 2)), ("eager", "compiled"), ("here", "there"), strict=True
        )
    ]
    assert scaling(runs).notes == (
        "the runs differ in more than their workers: they were executed as compiled in as-is, eager in as-is",
        "the runs are of 2 machines or versions: here; there",
    )


def test_predictions_stand_beside() -> None:
    """Each run's own, where it has one."""
    first, second = strong(0.1, (1, 2))
    first = first._replace(predicted=timeline(1, 1.1, origin="predicted"))
    found = scaling([first, second])
    assert found.points[0].error == pytest.approx(0.1)
    assert found.points[1].error is None


def test_without_one_worker_speed_ups_are_over_the_least() -> None:
    """Two workers count as two that lose nothing."""
    found = scaling(strong(0.1, (2, 4)))
    assert found.points[0].speedup == pytest.approx(2.0)
    assert found.notes == (
        "no run has 1 worker: speed-ups are those over 2 workers, each taken as one of 2 that lose nothing",
    )


REFUSED = {
    "wanted runs of one training step, got other and toy; name runs of one task": [
        run_of(1, 8, 1.0),
        run_of(2, 8, 1.0, title="other"),
    ],
    "wanted runs of one training step, got none; name runs of one task": [],
    "wanted runs with at least 2 different numbers of workers, got 2 with [2]; train with another --workers "
    "too": [
        run_of(2, 8, 1.0),
        run_of(2, 8, 1.1),
    ],
    """wanted one batch that the workers share, or as many samples for each, got workers x samples of 1 x 8, \
4 x 16; train with one --batch-size, or with one that grows with the workers""": [
        run_of(1, 8, 1.0),
        run_of(4, 16, 1.0),
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_runs_that_do_not_belong_together(message: str) -> None:
    """They are refused with what they have."""
    with pytest.raises(LawError) as refused:
        scaling(REFUSED[message])
    assert str(refused.value) == message


def test_a_batch_that_does_not_divide_is_shared() -> None:
    """64 samples over 3 workers are 22, 21 and 21: the first worker's share tells."""
    found = scaling([run_of(1, 64, 1.0), run_of(3, 22, 0.4)])
    assert found.regime == "strong"
    assert math.isclose(found.points[1].samples_per_s, 66 / 0.4)


def test_runs_of_unlike_models_are_refused() -> None:
    """A task file that was edited between two runs keeps its name."""
    first, second = strong(0.1, (1, 2))
    edited = second._replace(workload=make_workload(samples=32, gradient_bytes=(1 << 22,) * 4))
    with pytest.raises(
        LawError,
        match=r"^wanted runs of one model, got other parameters in run2 \(16\.0 MiB\) than in run1 "
        r"\(4\.00 MiB\); name runs of one task$",
    ):
        scaling([first, edited])


def test_other_ways_to_exchange_gradients_are_noted() -> None:
    """Between runs of several workers; one alone exchanges nothing."""
    syncs = (Sync(), Sync(algorithm="ring"), Sync(compression="int8"))
    plans = [
        Plan(workers=n, threads=1, sync=sync) for n, sync in zip((1, 2, 4), syncs, strict=True)
    ]
    runs = [
        run._replace(plan=plan) for run, plan in zip(strong(0.1, (1, 2, 4)), plans, strict=True)
    ]
    notes = scaling(runs).notes
    assert "the runs differ in how gradients are exchanged: all_reduce, ring" in notes
    assert "the runs differ in how gradients are exchanged: int8, none" in notes
    assert not any("exchanged" in note for note in scaling(runs[:2]).notes)
