"""Seconds of every distinct operator of a workload, measured in the order and company of its step."""

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec
import torch

from ridgeline.machine import OperatorTiming, Quantity, Setting
from ridgeline.probe.dispatch import reissue_excess
from ridgeline.probe.gpu import Ruler
from ridgeline.probe.peers import Peers
from ridgeline.probe.replay import Replay
from ridgeline.workload import Phase, Workload

BUDGET_S = 4.0
"""Default time for one workload and setting."""
LEAST_SAMPLES = 2
MOST_PASSES = 40
MOST_TAIL = 1.25
"""Delays beyond this share are not the machine's own: it was busy with something else."""
ISSUE_PASSES = 7
"""Passes in which only the host's time is read; they are short, and their median is quiet."""
LONG_S = 0.05
"""A first call this long is kept as a sample: what it spends on preparation is small beside it."""


def time_operators(
    workload: Workload,
    setting: Setting,
    peers: Peers | None = None,
    *,
    budget_s: float = BUDGET_S,
) -> tuple[tuple[OperatorTiming, ...], tuple[str, ...]]:
    """Timings of every distinct op of `workload`, and a warning for each op that cannot be issued.

    The step is replayed, all peers at once, for about `budget_s`; when a pass is too long for that,
    ops that have their samples are passed over. On the CPU a timing is all that the op costs a step:
    kernel, page faults of fresh outputs, freeing, and the host's dispatch in its phase. On GPUs it
    is the time of its kernels.

    Args:
        workload: As traced, with the batch of one worker.
        setting: Recorded in the timings; threads must be set already.
        peers: Who measures at the same time; None: this process alone.
        budget_s: Seconds; a step that takes longer still runs twice.

    Cost: Allocates what one step of the workload allocates.
    """
    device = torch.device(setting.device)
    peers = peers or Peers(rank=0, size=1, device=device)
    with torch.no_grad():
        replay = Replay(workload.ops, device)
        passes = _sample(replay, workload, peers, budget_s)
    samples = _settled(passes, [op.key for op in workload.ops])
    tail = _tail(passes, samples)
    excess: dict[Phase, float] = {}
    if setting.device == "cpu":
        excess = reissue_excess(device)
    warnings = tuple(
        f"operator {key} cannot be issued again and was not timed: {reason}"
        for key, reason in replay.failures.items()
    )
    by_key: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for index, seconds in samples.items():
        op = workload.ops[index]
        by_key[op.key][index] = [
            max(0.0, tail * taken + excess.get(op.phase, 0.0)) for taken in seconds
        ]
    timings = {
        key: OperatorTiming(setting=setting, key=key, seconds=_merge(by_index))
        for key, by_index in by_key.items()
        if key not in replay.failures
    }
    merged = _mean_of_peers(timings, workload, peers)
    if setting.device == "cuda":
        merged = _with_issue(merged, workload, _issue_seconds(replay, workload, device))
    return merged, warnings


def _issue_seconds(replay: Replay, workload: Workload, device: torch.device) -> dict[str, Quantity]:
    """Host seconds to issue each op in a real step, by key; the GPU runs behind meanwhile."""
    excess = reissue_excess(device)
    taken: dict[str, list[float]] = defaultdict(list)
    with torch.no_grad():
        for _ in range(ISSUE_PASSES):
            torch.cuda.synchronize()
            for index, (begin, end) in replay.run(lambda index: True).items():
                op = workload.ops[index]
                seconds = (end - begin) * 1e-9 + excess.get(op.phase, 0.0)
                taken[op.key].append(max(0.0, seconds))
    return {key: Quantity.measured(seconds, "s") for key, seconds in taken.items()}


def _with_issue(
    timings: tuple[OperatorTiming, ...], workload: Workload, issue: dict[str, Quantity]
) -> tuple[OperatorTiming, ...]:
    """The timings with what the host needs; a view launches no kernel, so nothing else is left of it."""
    views = {op.key for op in workload.ops if op.family == "view"}
    nothing = Quantity(value=0.0, unit="s", low=0.0, high=0.0, n=1, source="measured")
    return tuple(
        msgspec.structs.replace(
            timing,
            seconds=nothing if timing.key in views else timing.seconds,
            issue=issue.get(timing.key),
        )
        for timing in timings
    )


def _sample(
    replay: Replay, workload: Workload, peers: Peers, budget_s: float
) -> list[dict[int, float]]:
    """Seconds of every op by index, pass by pass; at least two passes."""
    clock = _Clock(peers.device)
    counts: Counter[str] = Counter()
    keys = [op.key for op in workload.ops]
    end = time.monotonic() + budget_s

    def wanted(index: int) -> bool:
        if counts[keys[index]] >= LEAST_SAMPLES and time.monotonic() > end:
            return False
        counts[keys[index]] += 1
        return True

    passes: list[dict[int, float]] = []
    while peers.agree(
        len(passes) < LEAST_SAMPLES or (time.monotonic() < end and len(passes) < MOST_PASSES)
    ):
        peers.barrier()
        passes.append(clock.run(replay, wanted))
    return passes


def _settled(passes: list[dict[int, float]], keys: list[str]) -> dict[int, list[float]]:
    """The samples of every op by index, without those that only warmed up."""
    first, later = passes[0], passes[1:]
    samples = {
        index: [taken[index] for taken in later if index in taken]
        for index in {index for taken in passes for index in taken}
    }
    has_later = {keys[index] for index, seconds in samples.items() if seconds}
    warm_up = {keys[index]: index for index in sorted(first, reverse=True)}
    numbers = Counter(keys[index] for index in first)
    for index, seconds in first.items():
        key = keys[index]
        is_spare = key in has_later or (warm_up[key] == index and numbers[key] > 1)
        if seconds >= LONG_S or not is_spare:
            samples[index].append(seconds)
    return {index: seconds for index, seconds in samples.items() if seconds}


def _tail(passes: list[dict[int, float]], samples: dict[int, list[float]]) -> float:
    """What a whole pass takes, over the sum of its ops' medians; 1.0 where no whole pass is known.

    The median of an op leaves out rare delays (interrupts, other programs, pages that the system
    takes back), but a step of hundreds of ops meets some of them every time.
    """
    totals = [sum(taken.values()) for taken in passes[1:] if len(taken) == len(samples)]
    medians = sum(statistics.median(seconds) for seconds in samples.values())
    if len(totals) < LEAST_SAMPLES or medians <= 0.0:
        return 1.0
    return min(max(1.0, statistics.median(totals) / medians), MOST_TAIL)


class _Clock:
    """Runs a replay and reads off seconds: the host's clock, or events on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._ruler = Ruler(device) if device.type == "cuda" else None

    def run(self, replay: Replay, wanted: Callable[[int], bool]) -> dict[int, float]:
        if self._ruler is None:
            marks = replay.run(wanted)
            return {index: (end - begin) * 1e-9 for index, (begin, end) in marks.items()}
        marks = replay.run(wanted, self._ruler.mark, self._ruler.pace)
        torch.cuda.synchronize()
        self._ruler.restart()
        return {index: self._ruler.seconds(*pair) for index, pair in marks.items()}


def _merge(by_index: dict[int, list[float]]) -> Quantity:
    """One figure for all occurrences of an op.

    Occurrences may differ (cold or warm inputs, fresh or used memory), and what counts for the step
    is their sum: so the value is the mean over the occurrences of the median over the passes.
    """
    spread = Quantity.measured([s for seconds in by_index.values() for s in seconds], "s")
    value = statistics.fmean(statistics.median(seconds) for seconds in by_index.values())
    return Quantity(
        value=value,
        unit="s",
        low=min(spread.low, value),
        high=max(spread.high, value),
        n=spread.n,
        source="measured",
    )


def _mean_of_peers(
    timings: dict[str, OperatorTiming], workload: Workload, peers: Peers
) -> tuple[OperatorTiming, ...]:
    """Timings averaged over the workers; ops that failed on any of them are left out."""
    keys = list(dict.fromkeys(op.key for op in workload.ops))
    missing = OperatorTiming(
        setting=Setting(device="cpu"), key="", seconds=Quantity.assumed(float("nan"), "s")
    )
    mine = [timings.get(key, missing).seconds for key in keys]
    rows = peers.gather([v for q in mine for v in (q.value, q.low, q.high)])
    merged = []
    for position, key in enumerate(keys):
        columns = [statistics.fmean(row[3 * position + part] for row in rows) for part in range(3)]
        if key in timings and columns[0] == columns[0]:  # not NaN on any worker
            quantity = Quantity(
                value=columns[0],
                unit="s",
                low=columns[1],
                high=columns[2],
                n=timings[key].seconds.n * peers.size,
                source="measured",
            )
            merged.append(OperatorTiming(setting=timings[key].setting, key=key, seconds=quantity))
    return tuple(merged)
