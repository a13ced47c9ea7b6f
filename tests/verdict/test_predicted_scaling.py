"""What a predicted curve says: laws through enough points, where it falls off, what was assumed of whom."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1]))

from ridgeline import laws, units
from ridgeline.codec import decode, encode
from ridgeline.plan import Choice, Plan
from ridgeline.simulator.curves.scaling import ScalingPoint
from ridgeline.verdict.predicted_scaling import PredictedScaling, predicted_scaling
from strategies import make_machine


def point(workers: int, speedup: float, notes: tuple[str, ...] = ()) -> ScalingPoint:
    rate = 100.0 * speedup
    return ScalingPoint(
        workers=workers,
        step_s=64 / rate,
        samples_per_s=rate,
        speedup=speedup,
        efficiency=speedup / workers,
        notes=notes,
    )


def curve(points: list[ScalingPoint], regime="strong", **given) -> PredictedScaling:
    return predicted_scaling("toy", regime, 64, make_machine(), Plan(), points, **given)


def amdahl_curve(parallel: float, counts: list[int], **given) -> PredictedScaling:
    return curve([point(n, laws.amdahl(parallel, n)) for n in counts], **given)


@given(st.floats(0.05, 0.999))
def test_laws_that_made_the_points_are_found(parallel: float) -> None:
    """From six numbers on, exactly: without intervals, since nothing scatters."""
    found = amdahl_curve(parallel, [1, 2, 4, 8, 16, 32])
    amdahl, usl = found.laws
    serial = amdahl.coefficients["serial_fraction"]
    assert serial.value == pytest.approx(1.0 - parallel, abs=1e-6)
    assert (serial.low, serial.high) == (None, None)
    assert usl.name == "usl"
    assert max(map(abs, amdahl.misses)) < 1e-6
    assert found.notes == ()


def test_too_few_points_have_no_law() -> None:
    """And a note says how many it wants."""
    found = amdahl_curve(0.9, [1, 2, 4, 8, 16])
    assert found.laws == ()
    assert found.notes == (
        "no law is drawn: 5 numbers of workers are predicted, a law needs 6; give more to --devices",
    )


def test_workers_with_batches_of_their_own_are_held_to_gustafson() -> None:
    """As measured ones are."""
    points = [point(n, laws.gustafson(0.2, n)) for n in (1, 2, 3, 4, 5, 6)]
    found = curve(points, regime="weak")
    assert [law.name for law in found.laws] == ["gustafson", "usl"]
    assert found.laws[0].coefficients["serial_fraction"].value == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("speedups", "falls"),
    [
        ({1: 1.0, 2: 1.7, 4: 3.2}, None),
        ({1: 1.0, 2: 1.7, 4: 3.19, 8: 5.0}, (2, 4)),
        ({1: 1.0, 2: 1.5, 4: 3.9}, (1, 2)),
        ({4: 3.0, 8: 7.9}, (None, 4)),
    ],
)
def test_where_it_falls_off(speedups: dict[int, float], falls) -> None:
    """The first number of workers with less than 80 %, and the one before; exactly 80 % is not less."""
    assert curve([point(n, s) for n, s in speedups.items()]).falls_off == falls


def test_more_than_there_are_workers_is_told() -> None:
    """By the most efficient number; a little more is no news."""
    points = [point(1, 1.0), point(2, 2.9), point(4, 5.0)]
    assert curve(points).notes[1] == (
        "2 workers are predicted to do 2.90 times the work of one, more than there are workers: with other "
        "threads, or a smaller batch, each is faster than 1 alone"
    )
    assert len(curve([point(1, 1.0), point(2, 2.1)]).notes) == 1


def test_a_least_number_above_one_is_told() -> None:
    """Efficiency is then relative to it."""
    notes = curve([point(4, 4.0), point(8, 7.0)]).notes
    assert notes[1] == (
        "speed-ups are those over 4 workers, each taken as one of 4 that lose nothing"
    )


def test_points_off_the_nearest_law_are_named() -> None:
    """As of measured ones: behind the slow link of a host efficiency breaks, which no smooth law does."""
    speedups = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0, 16: 4.0, 32: 8.0, 64: 16.0}
    found = curve([point(n, s) for n, s in speedups.items()])
    nearest = min(found.laws, key=lambda law: max(map(abs, law.misses)))
    off = [
        (p.workers, m) for p, m in zip(found.points, nearest.misses, strict=True) if abs(m) > 0.1
    ]
    assert off
    assert found.notes == tuple(
        f"{nearest.name} misses {units.counted(workers, 'worker')} by {units.percent(abs(miss))}: where a "
        "curve breaks, workers meet another link or fewer threads"
        for workers, miss in off
    )


def test_what_was_assumed_is_said_once() -> None:
    """Notes that differ in the number of workers alone are one; others name whose they are."""
    points = [
        point(1, 1.0, ("dispatch was not measured",)),
        point(
            2,
            2.0,
            (
                "dispatch was not measured",
                "one-off",
                "all_reduce over 2 workers: as from 2 workers",
            ),
        ),
        point(
            4, 4.0, ("dispatch was not measured", "all_reduce over 4 workers: as from 2 workers")
        ),
        point(
            8,
            8.0,
            (
                "dispatch was not measured",
                "all_reduce over 8 workers: as from 2 workers",
                "overlap at 8 x 1 cpu threads: as at 2 x 1 cpu threads",
            ),
        ),
    ]
    assert curve(points).notes[1:] == (
        "dispatch was not measured",
        "one-off, for 2",
        "all_reduce over N workers: as from 2 workers, for N = 2, 4, 8",
        "overlap at 8 x 1 cpu threads: as at 2 x 1 cpu threads",
    )


def test_the_noun_survives_its_file() -> None:
    """With the plan's settings alone: its reasons are of another question."""
    choice = Choice(knob="threads", value="1", origin="search", reason="faster")
    points = [point(1, 1.0), point(2, 1.9)]
    found = predicted_scaling(
        "toy",
        "weak",
        8,
        make_machine(),
        Plan(choices=(choice,)),
        points,
        others={"links=2x": points},
    )
    assert found.plan == Plan()
    assert found.others[0].points == found.points
    assert decode(PredictedScaling, encode(found), where="here") == found
