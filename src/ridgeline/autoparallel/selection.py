"""Which schedule is used: candidates come from the clock that predicts, the choice from what was measured."""

import statistics
from collections.abc import Mapping, Sequence

from ridgeline import units
from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.scheduling.chains import assign_chains, share_lanes
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.autoparallel.scheduling.merging import merge_lanes
from ridgeline.autoparallel.scheduling.schedule import Schedule, serial_schedule
from ridgeline.codec import Value
from ridgeline.machine import Quantity

SERIAL = "serial"
"""Name of the candidate on one lane."""
LANE_COUNTS = (2, 4, 8, 16)
"""Numbers of lanes that are tried, as far as allowed: more cost more syncs, fewer let parts wait."""
MOST_STREAMS = 31
"""torch hands out 32 streams a device by turns; one is kept for the capture."""
LEAST_GAIN = 1.02
"""Schedules that gain less are not worth several lanes' memory: what one lane frees no other lane can use."""


class ParallelChoice(Value, frozen=True, kw_only=True):
    """What is used, and why.

    `times_faster` is the median over the turns of serial seconds over its own; 1.0 for the serial one.
    """

    name: str
    times_faster: float = 1.0
    reason: str


def candidates(
    dag: Dag, costs: Sequence[NodeCost], most_lanes: int, *, sync_s: float = 0.0
) -> dict[str, Schedule]:
    """Schedules to be measured, by name; of equal ones the first.

    `serial` is everything on one lane. `concurrent` has a lane for whatever is independent. `2
    lanes` and on are merged from it by predicted cost, which may leave fewer lanes than allowed.

    No candidate has more than `most_lanes`; a wait for another lane adds `sync_s` seconds.
    """
    found = {SERIAL: serial_schedule(dag)}
    if most_lanes == 1 or dag.num_nodes < 2:
        return found
    widest = share_lanes(dag, assign_chains(dag))
    tried: dict[str, Schedule] = {}
    if widest.num_lanes <= min(most_lanes, MOST_STREAMS):
        tried["concurrent"] = widest
    merged = widest
    # From many to few: a merge of lanes that are merged already is cheap, and asks the clock less.
    counts = {min(count, most_lanes, MOST_STREAMS) for count in (*LANE_COUNTS, widest.num_lanes)}
    for count in sorted(counts, reverse=True):
        if count <= merged.num_lanes:  # each begins where the one with more lanes ended
            merged = merge_lanes(dag, merged, costs, most_lanes=count, sync_s=sync_s)
            tried[f"{merged.num_lanes} lanes"] = merged
    seen = {found[SERIAL].lane_of}
    for name, schedule in tried.items():
        if schedule.num_lanes > 1 and schedule.lane_of not in seen:
            seen.add(schedule.lane_of)
            found[name] = schedule
    return found


def choose(measured: Mapping[str, Sequence[float]], serial: str = SERIAL) -> ParallelChoice:
    """The fastest candidate; the serial one unless the gain is beyond the noise.

    Ratios are taken turn by turn, so a change of the machine's speed between turns does not count.
    The gain is beyond the noise where serial is slower in three quarters of the turns, and
    `LEAST_GAIN` times in the median.

    `measured` has seconds of a call, one a turn, the turns in the same order for all candidates.
    """
    base = statistics.median(measured[serial])
    others = [name for name in measured if name != serial]
    if not others:
        return ParallelChoice(name=serial, reason="no other way was measured")
    best = min(others, key=lambda name: statistics.median(measured[name]))
    own = statistics.median(measured[best])
    ratios = [slow / fast for slow, fast in zip(measured[serial], measured[best], strict=True)]
    found = Quantity.measured(ratios, "x")
    low, gain = found.low, found.value
    figures = f"{units.seconds(own)} against {units.seconds(base)} serially"
    if gain >= LEAST_GAIN and low > 1.0:
        reason = f"{best} is the fastest measured: {figures}, {gain:.2f} times faster"
        return ParallelChoice(name=best, times_faster=gain, reason=reason)
    if gain < 1.0:
        reason = f"nothing is gained: the best other way, {best}, takes {figures}"
    else:
        reason = (
            f"the gain of {best} is within the noise: {figures}, {gain:.2f} times, at least {low:.2f} in "
            f"three quarters of {len(ratios)} turns"
        )
    return ParallelChoice(name=serial, reason=reason)
