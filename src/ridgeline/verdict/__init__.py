"""The verdict: prediction against measurement, where the time went, and what to do next."""

from ridgeline.verdict.verdict import FrameError as FrameError
from ridgeline.verdict.verdict import LaneError as LaneError
from ridgeline.verdict.verdict import Verdict as Verdict
from ridgeline.verdict.verify import TOLERANCE as TOLERANCE
from ridgeline.verdict.verify import step_drift as step_drift
from ridgeline.verdict.verify import step_spread as step_spread
from ridgeline.verdict.verify import verify as verify
from ridgeline.verdict.waterfall import Part as Part

__all__ = ("FrameError", "LaneError", "Part", "Verdict", "step_drift", "step_spread", "verify")
