"""Where to cut the gradients into buckets so that the least communication is left exposed.

Large buckets waste no latency but start late and end late; small ones start early and pay latency often.
The best cuts follow from when each gradient is ready and how long each size takes, and from how much
computing and communicating slow each other: beside backward a collective takes longer than behind it.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ridgeline.execution import MODES
from ridgeline.machine import Machine
from ridgeline.plan import Plan, cut_buckets
from ridgeline.simulator.compiler.compiled import price_execution
from ridgeline.simulator.events import SimTask, run_tasks
from ridgeline.simulator.exchange.communication import overlap_gain, overlap_slowdown
from ridgeline.simulator.exchange.synchronising import BucketPrices
from ridgeline.simulator.model import as_run, setting_of
from ridgeline.simulator.pricing.dataflow import element_bytes
from ridgeline.simulator.pricing.pieces import bucket_gradients
from ridgeline.workload import Workload

MOST_GROUPS = 160
"""Gradients are first joined to at most this many groups, so that the search takes milliseconds."""
MOST_BUCKETS = 32
"""Buckets beyond this number only add latency."""
SLACK = 0.005
"""Ends of communication that differ by less than this fraction are as good: fewer buckets win."""
HIDING_GAIN = 1.3
"""What messages beside computing must gain at the least, over one after the other, to be sent so.

Source: four networks of 12 to 43 MiB with two workers on two cores. 0.86 to 1.17 were measured there, since
the cores that train copy the messages: steps with one bucket were 1 to 7 % faster than with several, where
from 2 % faster to 4 % slower was predicted.
"""


class Slowdown(NamedTuple):
    """How many times as long computing and communicating take beside each other."""

    compute: float = 1.0
    communication: float = 1.0


APART = Slowdown()


def best_cuts(
    sizes: Sequence[int],
    ready_s: Sequence[float],
    seconds: Callable[[int], float],
    *,
    slack: float = SLACK,
    slowdown: Slowdown = APART,
) -> tuple[int, ...]:
    """Number of gradients in each bucket: the fewest buckets whose last collective ends earliest.

    By dynamic programming over the ready order, for one bucket, two, and so on: the best end of the
    first j gradients in k buckets is the best, over all starts i of the last bucket, of
    `max(ready_j, end of the first i in k - 1) + seconds(bytes_i..j)`.

    Args:
        sizes: Bytes of each gradient, in ready order.
        ready_s: When each is ready, never falling.
        seconds: Time of the collective for so many bytes.
        slack: Ends within this fraction of the earliest are as good.
        slowdown: Of backward, taken to have a collective beside it from its first gradient on, and of what is
            sent before its end.

    Source: overlap recurrence start_k = max(ready_k, end_{k-1}); optimal because an earlier end of the
        first buckets never delays the last.
    """
    count = len(sizes)
    first_s = ready_s[0]
    # Backward is slowed from its first gradient on, since something is sent from then on.
    ready_s = [first_s + slowdown.compute * (at - first_s) for at in ready_s]
    durations = [_durations(sizes, last, seconds) for last in range(1, count + 1)]
    rounds: list[tuple[list[float], list[int]]] = []
    ends = [0.0] + [math.inf] * count
    while len(rounds) < min(count, MOST_BUCKETS):
        ends, before = _one_more_bucket(ends, ready_s, durations, slowdown.communication)
        rounds.append((ends, before))
    earliest = min(r[0][count] for r in rounds)
    # The fewest buckets: each one more costs the host a launch that the recurrence does not see.
    chosen = next(k for k, r in enumerate(rounds) if r[0][count] <= earliest * (1.0 + slack))
    lengths: list[int] = []
    at = count
    # Backwards from the last bucket, since each round knows only where its own begins.
    for _, before in reversed(rounds[: chosen + 1]):
        lengths.append(at - before[at])
        at = before[at]
    return tuple(reversed(lengths))


def _durations(sizes: Sequence[int], last: int, seconds: Callable[[int], float]) -> list[float]:
    """Seconds of a bucket of gradients first..last-1, for every first."""
    found = [0.0] * last
    num_bytes = 0
    # From the end, so that each sum is the one before plus one gradient.
    for first in range(last - 1, -1, -1):
        num_bytes += sizes[first]
        found[first] = seconds(num_bytes)
    return found


def _one_more_bucket(
    ends: Sequence[float],
    ready_s: Sequence[float],
    durations: Sequence[Sequence[float]],
    factor: float,
) -> tuple[list[float], list[int]]:
    """Earliest ends of all prefixes with one bucket more, and where that bucket starts."""
    over_s = ready_s[-1]
    better = [math.inf] * len(ends)
    before = [0] * len(ends)
    for last in range(1, len(ends)):
        ready, row = ready_s[last - 1], durations[last - 1]
        for first in range(last):
            start = max(ready, ends[first])
            end = start + row[first]
            # While backward continues, the collective takes `factor` times as long.
            if start < over_s:
                end = start + factor * row[first]
                if end > over_s:
                    end = over_s + row[first] - (over_s - start) / factor
            if end < better[last]:
                better[last], before[last] = end, first
    return better, before


def quickest_cuts(
    sizes: Sequence[int],
    ready_s: Sequence[float],
    seconds: Callable[[int], float],
    slowdown: Slowdown,
) -> tuple[int, ...]:
    """The better of the cuts with and without the slowdown, by when all is sent as the virtual clock has it.

    Arguments as in `best_cuts`, where either is a bound: backward is slowed only while something is sent.
    """
    apart = best_cuts(sizes, ready_s, seconds)
    # Both searches would be the same.
    if slowdown == APART:
        return apart
    beside = best_cuts(sizes, ready_s, seconds, slowdown=slowdown)
    ends = [last_end_s(cuts, sizes, ready_s, seconds, slowdown) for cuts in (apart, beside)]
    # Only for a clear gain: the slowdown was measured for one size of message, the cuts have many.
    return beside if ends[1] < ends[0] * (1.0 - SLACK) else apart


def last_end_s(
    lengths: Sequence[int],
    sizes: Sequence[int],
    ready_s: Sequence[float],
    seconds: Callable[[int], float],
    slowdown: Slowdown,
) -> float:
    """Seconds from the start of backward until the last bucket of these lengths is sent."""
    tasks: list[SimTask] = []
    at, before_s = 0, 0.0
    for number, length in enumerate(lengths):
        last_s = ready_s[at + length - 1]
        # Priced as a whole: the sum of the members' seconds would pay the latency for each.
        own_s = seconds(sum(sizes[at : at + length]))
        full = (f"bucket/{number}",)
        tasks += [
            SimTask(name="b", lane="compute", duration_ns=_ns(last_s - before_s), writes=full),
            SimTask(name="c", lane="communication", duration_ns=_ns(own_s), reads=full),
        ]
        at, before_s = at + length, last_s
    spans = run_tasks(tasks, {"compute": slowdown.compute, "communication": slowdown.communication})
    return max(span.end_ns for span in spans) * 1e-9


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def is_worth_hiding(machine: Machine, workload: Workload, plan: Plan) -> bool:
    """Whether messages that go while workers compute may gain something; yes, where it was not measured."""
    gain = overlap_gain(machine, setting_of(machine, workload, plan))
    return gain is None or gain >= HIDING_GAIN


def searched_bucket_bytes(
    machine: Machine, workload: Workload, plan: Plan
) -> tuple[int, ...] | None:
    """Limits for `sync.bucket_bytes` that make `cut_buckets` cut where it is best.

    None when there is nothing to cut, or gradients of several dtypes interleave, which no limits reproduce.

    Of the plan its workers, threads, execution, precision, accumulation, algorithm and compression are used.

    Raises:
        MachineError: the profile lacks what the step needs.
    """
    workload = as_run(workload, plan)
    gradients = bucket_gradients(workload, plan.sync)
    # Limits are filled dtype by dtype, so with several no sequence of limits stands for the cuts.
    if len(gradients) < 2 or len({p.dtype for p in gradients}) > 1:
        return None
    setting = setting_of(machine, workload, plan)
    prices = BucketPrices(machine, plan.sync, setting)
    each = element_bytes(gradients[0].dtype)
    ready, kernels_s = _ready_seconds(machine, workload, plan, [p.ready_op for p in gradients])
    sizes, ready_s = _grouped([p.num_bytes for p in gradients], ready)
    # The note about an assumed overlap comes with the simulated plan, not with its search.
    beside, _ = overlap_slowdown(machine, setting, kernels_s, plan.sync)
    slowdown = Slowdown(beside.get("compute", 1.0), beside.get("communication", 1.0))
    lengths = quickest_cuts(
        sizes, ready_s, lambda num_bytes: prices.whole_seconds(num_bytes, each), slowdown
    )
    limits = []
    at = 0
    for length in lengths:
        limits.append(sum(sizes[at : at + length]))
        at += length
    # A plan cannot say a limit of 0, which a bucket of empty parameters would have.
    if min(limits) < 1:
        return None
    # The runtime cuts by these limits; where it would cut elsewhere they must not be in a plan.
    cuts = cut_buckets([(p.num_bytes, p.dtype) for p in gradients], limits)
    reproduced = [sum(gradients[i].num_bytes for i in cut) for cut in cuts]
    return tuple(limits) if reproduced == limits else None


def _ready_seconds(
    machine: Machine, workload: Workload, plan: Plan, ops: Sequence[int]
) -> tuple[list[float], list[float]]:
    """When operators of backward are done, from its start (-1: all), and the seconds of its kernels."""
    setting = setting_of(machine, workload, plan)
    priced = price_execution(machine, workload, setting, plan)
    mode = MODES[plan.execution]
    issues = setting.device == "cuda" and not mode.is_replayed_on("cuda")
    at = 0.0
    ready: list[tuple[int, float]] = []
    for piece in priced.backward:
        # Gradients are final in the last micro-batch only, so its backward is the one that hides.
        part = piece.divided(plan.accumulate)
        # The device waits for launches only when issuing is slower; either way this is the earliest.
        at += max(part.lane_s, part.host_s) if issues else part.lane_s
        if piece.op >= 0:
            ready.append((piece.op, at))
    kernels_s = [piece.work_s for piece in priced.backward if piece.has_kernel]
    # A kernel that was fused stands for several operators; it is done before any operator after it.
    done = [op for op, _ in ready]
    found = [ready[bisect_right(done, op) - 1][1] if ready and op >= 0 else at for op in ops]
    return found, kernels_s


def _grouped(sizes: Sequence[int], ready_s: Sequence[float]) -> tuple[list[int], list[float]]:
    """Neighbours joined until few enough are left; a group is ready with its last member."""
    least = 0
    if len(sizes) > MOST_GROUPS:
        least = 2 * sum(sizes) // MOST_GROUPS
    joined: list[int] = []
    ready: list[float] = []
    is_open = False
    latest = 0.0
    for size, at in zip(sizes, ready_s, strict=True):
        latest = max(latest, at)
        if is_open:
            joined[-1] += size
            ready[-1] = latest
        else:
            joined.append(size)
            ready.append(latest)
        is_open = joined[-1] < max(least, 1)
    return joined, ready
