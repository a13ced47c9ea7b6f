"""Differences beside what they may be: which one decides."""

import math

from ridgeline.runtime.steps.checks.allowed_gaps import Gap


def test_a_gap_without_a_limit_hides_no_other() -> None:
    """Beside draws that are no numbers anything is allowed, and the next gap still counts."""
    boundless = Gap(math.inf, math.inf, "the eager step in distribution")
    wrong = Gap(3.0, 0.1, "the eager step", "the gradient of weight")
    assert max([boundless, wrong], key=Gap.excess) is wrong
