"""What `verify` refuses to compare, each with what it wants instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import VerificationError
from ridgeline.verdict import verify
from strategies import make_timeline

TIMELINE = make_timeline([("forward", "compute", 0, 5)])


def test_a_step_without_duration() -> None:
    """There is nothing to compare a prediction with."""
    with pytest.raises(VerificationError) as error:
        verify(TIMELINE, make_timeline([], steps_ns=(0,)))
    assert str(error.value) == (
        "wanted a measured step that takes time, got 0 ns in 'toy'; record at least one step after the "
        "warm-up"
    )


@pytest.mark.parametrize("which", ["predicted", "measured"])
def test_no_steps(which: str) -> None:
    """A timeline of no steps has no step, on either side."""
    pair = {"predicted": TIMELINE, "measured": TIMELINE, which: make_timeline([], steps_ns=())}
    with pytest.raises(VerificationError) as error:
        verify(**pair)
    assert str(error.value) == (
        f"wanted a {which} timeline with at least one step, got none in 'toy'; record at least one step after "
        "the warm-up"
    )


@given(st.floats())
def test_tolerances(tolerance: float) -> None:
    """A finite tolerance that is not negative is taken as it is, every other one refused."""
    if 0.0 <= tolerance < float("inf"):
        assert verify(TIMELINE, TIMELINE, tolerance=tolerance).passed
        return
    with pytest.raises(VerificationError) as error:
        verify(TIMELINE, TIMELINE, tolerance=tolerance)
    assert str(error.value) == (
        f"wanted a finite tolerance >= 0, got {tolerance:g}; give a fraction such as 0.15"
    )
