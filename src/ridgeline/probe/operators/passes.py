"""Passes over a replayed step: two to warm up, then samples, and whole passes to hold them against."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.operators.clock import Passes, ReplayClock
from ridgeline.probe.operators.replay import WorkloadReplay

WARM_PASSES = 2
"""Passes before the first sample. In the first, libraries load kernels and choose algorithms and memory
comes fresh from the system; in the second the allocator finds where everything goes."""
MOST_WARM_PASSES = 5
SETTLED = 0.95
"""A pass that takes this share of the one before, or more, does not warm up any more."""
MOST_WARM_S = 15.0
"""No further pass begins to warm up after this: the step is a long one."""
LEAST_SAMPLES = 2
MOST_PASSES = 40
WHOLE_EVERY = 3
"""Every third pass is timed as a whole, so that drift of the machine meets both kinds alike."""


def timed_passes(
    replay: WorkloadReplay,
    clock: ReplayClock,
    keys: Sequence[str],
    peers: Peers,
    *,
    budget_s: float,
) -> Passes:
    """Warm up until passes are no faster than those before, then sample all ops for about `budget_s`.

    A step of which a single pass takes longer than the budget is sampled once, and once the budget is
    spent only ops of which no equal one was issued are issued, and what those need, so that it ends.

    Keys are equal for equal ops; warming up is not counted in `budget_s`.
    """
    taken_s = _warm_up(replay, clock, keys, peers, budget_s)
    # Rank 0 decides how many: the others would wait at a barrier that nobody comes to.
    least = LEAST_SAMPLES if peers.agree(taken_s < budget_s) else 1
    found = Passes()
    once = _Once(keys, replay.makes_for, time.monotonic() + budget_s, least)
    while peers.agree(
        len(found.ops) < least or (not once.is_over() and len(found.ops) < MOST_PASSES)
    ):
        with torch.no_grad():
            # Outside of the pass, whose time it would be in.
            replay.refresh()
        peers.barrier()
        found.ops.append(clock.ops(replay, once.wanted))
        if peers.agree(len(found.ops) % (WHOLE_EVERY - 1) == 0 and not once.is_over()):
            peers.barrier()
            whole = clock.whole(replay)
            if whole is not None:
                found.whole.append(whole)
    return found


def _warm_up(
    replay: WorkloadReplay, clock: ReplayClock, keys: Sequence[str], peers: Peers, budget_s: float
) -> float:
    """Passes that are not timed, two at least unless the first takes very long; seconds of the last one."""
    start = time.monotonic()
    before_s = taken_s = 0.0
    for number in range(MOST_WARM_PASSES):
        is_warm = number >= WARM_PASSES and taken_s > SETTLED * before_s
        if number and not peers.agree(not is_warm and time.monotonic() - start < MOST_WARM_S):
            break
        peers.barrier()
        begin = time.monotonic()
        once = _Once(keys, replay.makes_for, begin + budget_s)
        clock.warm(replay, once.wanted, is_first=number == 0)
        before_s, taken_s = taken_s, time.monotonic() - begin
    return taken_s


class _Once:
    """Says which ops to issue: all of them until a time, then those that were issued too rarely."""

    def __init__(
        self,
        keys: Sequence[str],
        makes_for: Mapping[int, Collection[str]],
        end: float,
        least: int = 1,
    ) -> None:
        self._keys = keys
        self._makes_for = makes_for
        self._end = end
        self._least = least
        self._counts: Counter[str] = Counter()

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._end

    def wanted(self, index: int) -> bool:
        """Whether op `index` is to be issued."""
        # By key, so that equal operators share what is left of the time. One that was issued often enough
        # may be equal to one that makes the workspace of another.
        needed = (self._keys[index], *self._makes_for.get(index, ()))
        if all(self._counts[key] >= self._least for key in needed) and self.is_over():
            return False
        self._counts[self._keys[index]] += 1
        return True
