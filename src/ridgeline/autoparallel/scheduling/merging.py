"""Fewer lanes where the clock sees no gain in more of them.

A lane of its own for whatever is independent costs syncs, and gains nothing where the device is full anyway.
"""

from collections.abc import Sequence

from ridgeline.autoparallel.graphs.dag import Dag, minimum_equivalent
from ridgeline.autoparallel.scheduling.makespan import NodeCost, run_schedule
from ridgeline.autoparallel.scheduling.schedule import Schedule, in_program_order, needed_syncs

TRIALS = 200_000
"""About as many nodes go through the virtual clock for each round over all pairs, a few seconds at worst."""
MOST_TRIED = 24
"""More lanes than this are folded before pairs of them are tried."""


def merge_lanes(
    dag: Dag, schedule: Schedule, costs: Sequence[NodeCost], *, most_lanes: int, sync_s: float
) -> Schedule:
    """Joins two lanes at a time, as long as the predicted makespan does not grow.

    Then continues, with the pair that costs least, until there are at most `most_lanes`. Joined lanes run in
    issue order. Lanes that are too many to try all pairs are folded first, those that run at different times
    together; where more are there than allowed, folding alone is tried too, and the better one is kept.

    `schedule` is that of `share_lanes`; `sync_s` as of `run_schedule`.
    """
    affordable = int((TRIALS / max(1, dag.num_nodes)) ** 0.5)
    # Pairs grow with the square of the lanes, and each pair goes through the clock.
    starts = {max(most_lanes, min(MOST_TRIED, affordable)), most_lanes}
    found: list[tuple[float, int, Schedule]] = []
    for count in sorted(starts, reverse=True):
        start = schedule
        if schedule.num_lanes > count:
            start = _fold(dag, schedule, costs, count, sync_s)
        merger = _Merger(dag, start, costs, sync_s)
        merged = merger.merge(most_lanes)
        found.append((merger.makespan, merged.num_lanes, merged))
        if schedule.num_lanes <= most_lanes:
            break  # the other start would be the same
    return min(found, key=lambda entry: entry[:2])[2]


def _fold(
    dag: Dag, schedule: Schedule, costs: Sequence[NodeCost], count: int, sync_s: float
) -> Schedule:
    """At most `count` lanes: by their start, each continues as the one that is done first."""
    times = run_schedule(costs, schedule, sync_s=sync_s)
    first = [float("inf")] * schedule.num_lanes
    work = [0.0] * schedule.num_lanes
    for node, lane in enumerate(schedule.lane_of):
        first[lane] = min(first[lane], times.starts[node])
        work[lane] += costs[node].seconds
    until = [0.0] * count
    folded = [0] * schedule.num_lanes
    for lane in sorted(range(schedule.num_lanes), key=lambda lane: (first[lane], lane)):
        # The lane that is free first waits least for what its new nodes come after.
        target = min(range(count), key=lambda index: (until[index], index))
        folded[lane] = target
        until[target] = max(until[target], first[lane]) + work[lane]
    return _renumbered(dag, [folded[lane] for lane in schedule.lane_of])


class _Merger:
    """Greedy merging with the makespan of every pair kept until the pair is looked at again."""

    def __init__(
        self, dag: Dag, schedule: Schedule, costs: Sequence[NodeCost], sync_s: float
    ) -> None:
        self._dag = minimum_equivalent(dag)  # orders the same, and is faster to go through
        self._costs = costs
        self._sync_s = sync_s
        self._lane_of = list(schedule.lane_of)
        self.makespan = run_schedule(costs, schedule, sync_s=sync_s).makespan

    def merge(self, most_lanes: int) -> Schedule:
        lanes = sorted(set(self._lane_of))
        pairs = {(a, b): self._joined(a, b) for a in lanes for b in lanes if a < b}
        while pairs:
            pair = self._best(pairs)
            # Fewer lanes of equal length are better: the slack is for rounding alone.
            is_allowed = pairs[pair] <= self.makespan * (1 + 1e-9)
            if not is_allowed and len(lanes) <= most_lanes:
                break
            self.makespan = pairs[pair]
            kept, gone = pair
            self._lane_of = [kept if lane == gone else lane for lane in self._lane_of]
            lanes.remove(gone)
            # Values of pairs that are left are too low or too high by now; `_best` looks at them again before
            # use.
            pairs = {p: value for p, value in pairs.items() if gone not in p}
            for lane in lanes:
                if lane != kept:
                    low, high = min(lane, kept), max(lane, kept)
                    pairs[low, high] = self._joined(low, high)
        return _renumbered(self._dag, self._lane_of)

    def _best(self, pairs: dict[tuple[int, int], float]) -> tuple[int, int]:
        """The pair of least makespan; a kept value is checked before it is believed."""
        while True:
            pair = min(pairs, key=lambda p: (pairs[p], p))
            now = self._joined(*pair)
            if now <= pairs[pair] * (1 + 1e-9):
                pairs[pair] = now
                return pair
            pairs[pair] = now

    def _joined(self, kept: int, gone: int) -> float:
        lane_of = [kept if lane == gone else lane for lane in self._lane_of]
        schedule = _renumbered(self._dag, lane_of)
        return run_schedule(self._costs, schedule, sync_s=self._sync_s).makespan


def _renumbered(dag: Dag, lane_of: Sequence[int]) -> Schedule:
    """Lanes renumbered by their first node, with the syncs that they need."""
    numbers: dict[int, int] = {}
    for lane in lane_of:
        numbers.setdefault(lane, len(numbers))
    renumbered = [numbers[lane] for lane in lane_of]
    return in_program_order(renumbered, needed_syncs(dag, renumbered, range(dag.num_nodes)))
