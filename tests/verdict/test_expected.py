"""What the verdict judges: the newest knowledge before training; what was predicted before stands beside it."""

from pathlib import Path

import msgspec
import pytest

from ridgeline.codec import decode, encode
from ridgeline.timeline import Timeline
from ridgeline.verdict import Verdict, step_drift, verify
from strategies import make_timeline

MS = 1_000_000


def _timeline(step_ms: int, origin: str = "predicted") -> Timeline:
    spans = [("input", "host", 0, MS), ("forward", "compute", MS, step_ms * MS)]
    return make_timeline(spans, origin=origin)


MEASURED = _timeline(134, "measured")


def test_the_headline_is_what_was_expected_when_training_began() -> None:
    """The prediction missed by a third, its trial corrected it: the run went as expected."""
    verdict = verify(_timeline(183), MEASURED, expected=_timeline(131))
    assert verdict.passed
    assert verdict.error == 131 / 134 - 1
    assert verdict.error_before == 183 / 134 - 1
    assert (verdict.predicted_ns, verdict.expected_ns) == (183 * MS, 131 * MS)
    frames = {frame.name: frame.predicted_ns for frame in verdict.frames}
    assert frames == {"input": MS, "forward": 130 * MS}
    lanes = {lane.lane: lane.predicted_ns for lane in verdict.lanes}
    assert lanes == {"host": MS, "compute": 130 * MS}


def test_one_line_says_both() -> None:
    """Expected and predicted, each with its error against what was measured."""
    verdict = verify(_timeline(183), MEASURED, expected=_timeline(131))
    assert verdict.outlook == (
        "expected 131 ms when training began, took 134 ms (-2.2 %); predicted 183 ms before any trial "
        "(+36.6 %)"
    )
    assert (
        "model expected 131 ms when training began, took 134 ms (-2.2 %); predicted 183\n"
        "      ms before any trial (+36.6 %): holds (tolerance 15.0 %)"
    ) in verdict.text


def test_an_unpredicted_miss_of_the_trial_is_still_told() -> None:
    """Where the trial misled, the run is off, though the prediction before it would have held."""
    verdict = verify(_timeline(134), MEASURED, expected=_timeline(200))
    assert not verdict.passed
    assert "took 134 ms (+49.3 %); predicted 134 ms before any trial (+0.0 %)" in verdict.outlook


@pytest.mark.parametrize("is_given", [False, True])
def test_without_a_trial_the_prediction_is_what_was_expected(is_given: bool) -> None:
    """There is one error only, and one number."""
    predicted = _timeline(183)
    verdict = verify(predicted, MEASURED, expected=_timeline(183) if is_given else None)
    assert verdict.error == 183 / 134 - 1
    assert (verdict.expected_ns, verdict.error_before) == (None, None)
    assert verdict.outlook == "predicted 183 ms, took 134 ms (+36.6 %)"
    assert "model predicted 183 ms, took 134 ms (+36.6 %): is off (tolerance" in verdict.text


def test_notes_are_those_of_what_is_judged() -> None:
    """The note of the correction is among them."""
    after = msgspec.structs.replace(_timeline(131), notes=("corrected by the trial",))
    assert verify(_timeline(183), MEASURED, expected=after).notes[0] == "corrected by the trial"


def test_verdicts_of_earlier_releases_are_read(tmp_path: Path) -> None:
    """Their files say nothing of trials or drift."""
    verdict = verify(_timeline(140), MEASURED)
    content = msgspec.json.decode(encode(verdict))
    del content["sha256"]
    for field in ("expected_ns", "error_before", "drift"):
        del content["value"][field]
    old = decode(Verdict, msgspec.json.encode(content), where="verdict.json")
    assert old == verdict
    assert old.outlook == "predicted 140 ms, took 134 ms (+4.5 %)"


@pytest.mark.parametrize(
    ("steps_ns", "drift"),
    [
        ((100, 100, 100, 100, 110, 110, 110, 110), 0.1),
        ((100, 900, 100, 100, 100, 100, 100, 100, 1), 0.0),
        ((100,) * 7, None),
        ((0,) * 8, None),
    ],
)
def test_drift_is_the_later_half_over_the_earlier(steps_ns: tuple, drift: float | None) -> None:
    """Single slow steps do not count, too few steps tell nothing."""
    timeline = make_timeline([], steps_ns=steps_ns)
    assert step_drift(timeline) == (pytest.approx(drift) if drift is not None else None)


def test_the_drift_of_the_machine_stands_beside_the_spread() -> None:
    """It is no error of any prediction."""
    steps = (100,) * 4 + (110,) * 4
    measured = make_timeline([("forward", "compute", 0, 100)], steps_ns=steps)
    verdict = verify(measured, measured)
    assert verdict.drift == pytest.approx(0.1)
    assert verdict.why.startswith("a step takes 100 ns (median of 8, spread 10.0 %, drift +10.0 %)")
