"""What a step takes at best while workers exchange what they do: nothing that computes faster shortens that.

A plan that differs from a tried one in how it computes may be faster than expected, by how much is in doubt.
Its collectives are not: they send the same bytes over the same link, and over a slow one they are the step.
"""

from ridgeline.planner.ranking import Candidate


def least_share(candidate: Candidate, computing: float, exchanging: float) -> float:
    """What share of the expected step is left at least.

    `computing` and `exchanging` are the shares of these that are left at least.

    Source: collectives that follow each other without a gap, on one lane, with nothing but computing before
        the first and behind the last.
    """
    timeline = candidate.timeline
    spans = timeline.lane("communication")
    # Without collectives nothing bounds the step from below.
    if not spans or not timeline.step_ns:
        return 0.0
    begin = min(span.start_ns for span in spans)
    window_ns = max(span.end_ns for span in spans) - begin
    around_ns = max(0, timeline.step_ns - window_ns)
    busy_ns = timeline.busy_ns("communication")
    return (exchanging * busy_ns + computing * around_ns) / timeline.step_ns
