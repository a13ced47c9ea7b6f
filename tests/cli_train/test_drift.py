"""A machine that changes its speed between trial and run is named as such."""

import pytest

from ridgeline import units
from ridgeline.cli.training.training_run import with_drift, with_stale_profile
from ridgeline.timeline import Timeline

PREFIX, SUFFIX = "the machine was", "356 ms for the same plan"


def timeline(step_ns: int) -> Timeline:
    return Timeline(
        origin="measured", title="t", workers=2, spans=(), steps_ns=(step_ns,), notes=("first",)
    )


@pytest.mark.parametrize(
    ("step_ns", "note"),
    [
        (
            449_000_000,
            f"{PREFIX} slower during the run than when the plan was tried: 449 ms a step against {SUFFIX}",
        ),
        (
            300_000_000,
            f"{PREFIX} faster during the run than when the plan was tried: 300 ms a step against {SUFFIX}",
        ),
    ],
)
def test_a_notable_change_of_speed_is_noted(step_ns: int, note: str) -> None:
    """More than a tenth between trial and run is said, after what the run noted itself."""
    assert with_drift(timeline(step_ns), timeline(356_000_000)).notes == ("first", note)


@pytest.mark.parametrize("trial", [None, timeline(0), timeline(100), timeline(91)])
def test_ordinary_spread_is_not(trial: Timeline | None) -> None:
    """Without a trial, or within a tenth of it, nothing is added."""
    measured = timeline(100)
    assert with_drift(measured, trial) == measured


@pytest.mark.parametrize(
    ("predicted", "is_stale"), [(1000, True), (60, True), (140, False), (80, False)]
)
def test_a_profile_of_another_hour_is_named(predicted: int, is_stale: bool) -> None:
    """When trial and run agree against the prediction, the first note says to measure again."""
    measured = timeline(100)
    noted = with_stale_profile(measured, timeline(105), timeline(predicted)).notes
    assert (len(noted) == 2) is is_stale
    if is_stale:
        assert noted[0] == (
            f"trial (105 ns) and run (100 ns) agree that the saved profile ({units.nanoseconds(predicted)} "
            "predicted) does not describe this machine as it is now: measure again with ridgeline measure "
            "--refresh"
        )


def test_trial_and_run_that_disagree_blame_no_profile() -> None:
    """If only one of them is far from the prediction, the profile may be right."""
    assert with_stale_profile(timeline(100), timeline(900), timeline(1000)).notes == ("first",)
    assert with_stale_profile(timeline(100), None, timeline(1000)).notes == ("first",)
