"""Seconds of every distinct operator of a workload, measured in the order and company of its step."""

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
import torch

from ridgeline.host.speed import HOST_SPEED
from ridgeline.machine import OperatorTiming, Quantity, Setting, StepCheck, Workspace
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.operators.captured import captured_seconds
from ridgeline.probe.operators.clock import Passes, ReplayClock
from ridgeline.probe.operators.host_costs import host_costs
from ridgeline.probe.operators.passes import timed_passes
from ridgeline.probe.operators.replay import WorkloadReplay
from ridgeline.probe.operators.whole_step import check_step, correction, warning
from ridgeline.probe.operators.workspaces import measured_workspaces
from ridgeline.workload import Workload

BUDGET_S = {"cpu": 4.0, "cuda": 1.2}
"""Default time for samples of one workload at one setting; a GPU's passes are short."""
ISSUE_PASSES = 7
"""Passes in which only the host's time is read; they are short, and their median is quiet."""
ISSUE_BUDGET_S = 0.7
"""Where the GPU's work is long, so are these passes: two will do then."""


class Timed(NamedTuple):
    """What was found out about the operators of one workload at one setting."""

    timings: tuple[OperatorTiming, ...]
    warnings: tuple[str, ...]
    check: StepCheck


def time_operators(
    workload: Workload,
    setting: Setting,
    peers: Peers | None = None,
    *,
    budget_s: float | None = None,
    skip: Collection[str] = (),
    clock: ReplayClock | None = None,
) -> Timed:
    """Timings of every distinct op of `workload`, and a warning for each op that cannot be issued.

    The step is replayed, all peers at once: first to warm up, then for about `budget_s`; when a pass is
    too long for that, ops that have their samples are passed over. On the CPU a timing is all that the
    op costs a step: kernel, page faults of fresh outputs, freeing, and the host's dispatch in its phase.
    On GPUs it is the time of its kernels, and none for ops of the host. Timings are corrected by a
    check against whole passes. The workspace of each op is measured last.

    Args:
        workload: As traced, with the batch of one worker.
        setting: Recorded in the timings; threads must be set already.
        peers: Who measures at the same time; None: this process alone.
        budget_s: Seconds; None: by the device. A step that takes longer still runs twice.
        skip: Keys of ops that are not to be issued.
        clock: Of this setting's device; None makes one.

    Raises:
        DeviceLostError: an op left the GPU unusable for this process.

    Cost: Allocates what one step of the workload allocates.
    """
    device = torch.device(setting.device)
    peers = peers or Peers(rank=0, size=1, device=device)
    clock = clock or ReplayClock(device)
    budget_s = BUDGET_S[setting.device] if budget_s is None else budget_s
    keys = [op.key for op in workload.ops]
    with torch.no_grad():
        replay = WorkloadReplay(workload.ops, device, has_host=workload.device == "cuda", skip=skip)
        passes = timed_passes(replay, clock, keys, peers, budget_s=budget_s)
    samples = _samples(passes, clock, keys, replay)
    check = check_step(workload, setting, passes, _everywhere(samples, keys))
    by_key = _by_key(workload, setting, samples, correction(check))
    seconds = _mean_of_peers(by_key, dict.fromkeys(keys), peers)
    issue: dict[str, Quantity] = {}
    if setting.device == "cuda":
        issue = _issue_seconds(replay, workload, device, clock)
        # Behind the host's passes, which captures would disturb.
        captured = captured_seconds(replay, workload.ops, device)
        seconds = _of_kernels(seconds, captured, workload)
    told = _warnings(workload, replay, setting)  # before the next pass, whose end is no timing's
    spaces, notes = measured_workspaces(replay, workload, setting, clock)
    timings = _timings(setting, seconds, issue, spaces)
    return Timed(timings, (*told, *filter(None, [warning(check)]), *notes), check)


def _timings(
    setting: Setting,
    seconds: Mapping[str, Quantity],
    issue: Mapping[str, Quantity],
    spaces: Mapping[str, Workspace],
) -> tuple[OperatorTiming, ...]:
    return tuple(
        OperatorTiming(
            setting=setting, key=k, seconds=s, issue=issue.get(k), workspace=spaces.get(k)
        )
        for k, s in seconds.items()
    )


def _of_kernels(
    seconds: Mapping[str, Quantity], captured: Mapping[str, Quantity], workload: Workload
) -> dict[str, Quantity]:
    """Seconds on the GPU, of captures where there are any; views and ops of the host have none there."""
    idle = {op.key for op in workload.ops if op.family == "view" or op.runs_on_host}
    # Zero and measured: nothing is to be assumed of what has no kernel.
    nothing = Quantity.measured([0.0], "s")
    return {k: nothing if k in idle else captured.get(k, s) for k, s in seconds.items()}


def _samples(
    passes: Passes, clock: ReplayClock, keys: list[str], replay: WorkloadReplay
) -> dict[int, list[float]]:
    """Seconds of every op by index; of one that was always late, those."""
    samples: dict[int, list[float]] = defaultdict(list)
    for taken in passes.ops:
        for index, seconds in taken.items():
            samples[index].append(seconds)
    # Better a time that may have waited than none: such operators wait in a step as well.
    for index, seconds in clock.late.items():
        if index not in samples:
            samples[index] = list(seconds)
    return {i: s for i, s in sorted(samples.items()) if keys[i] not in replay.failures}


def _everywhere(samples: Mapping[int, list[float]], keys: list[str]) -> dict[int, float]:
    """Seconds of every op by index, for one that was passed over those of its equals."""
    known = {index: statistics.median(seconds) for index, seconds in samples.items()}
    by_key: dict[str, list[float]] = defaultdict(list)
    for index, seconds in known.items():
        by_key[keys[index]].append(seconds)
    return {
        index: known[index] if index in known else statistics.fmean(by_key[key])
        for index, key in enumerate(keys)
        if key in by_key
    }


def _by_key(
    workload: Workload, setting: Setting, samples: Mapping[int, list[float]], scale: float
) -> dict[str, Quantity]:
    """One figure for all occurrences of an op, with the host's part where that is not seen in a replay."""
    beyond = [0.0] * len(workload.ops)
    # On a GPU the host's part is in `issue`, which is measured apart.
    if setting.device == "cpu":
        beyond = host_costs("cpu").of(workload)
    by_key: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for index, seconds in samples.items():
        op = workload.ops[index]
        by_key[op.key][index] = [max(0.0, scale * taken + beyond[index]) for taken in seconds]
    return {key: _merge(by_index) for key, by_index in by_key.items()}


def _warnings(workload: Workload, replay: WorkloadReplay, setting: Setting) -> tuple[str, ...]:
    views = {op.key for op in workload.ops if op.family == "view"}  # which take no time that counts
    found = [
        f"operator {key} could not be timed: {reason}"
        for key, reason in replay.failures.items()
        if key not in views
    ]
    if replay.ended_at is not None:
        found.append(
            f"operators of {workload.name} from number {replay.ended_at} of {len(workload.ops)} on were "
            f"not timed at {setting}: memory ran out; use a smaller batch, or leave more memory free"
        )
    return tuple(found)


def _issue_seconds(
    replay: WorkloadReplay, workload: Workload, device: torch.device, clock: ReplayClock
) -> dict[str, Quantity]:
    """Host seconds to issue each op in a real step, by key; the GPU runs behind meanwhile."""
    beyond = host_costs(device.type).of(workload)
    taken: dict[str, list[float]] = defaultdict(list)
    HOST_SPEED.wait()
    end = time.monotonic() + ISSUE_BUDGET_S
    with torch.no_grad():
        for number in range(ISSUE_PASSES):
            # Two at least: the first pass may load what the second finds.
            if number > 1 and time.monotonic() > end:
                break
            torch.cuda.synchronize()
            for index, seconds in clock.issuing(replay).items():
                taken[workload.ops[index].key].append(max(0.0, seconds + beyond[index]))
    return {key: Quantity.measured(seconds, "s") for key, seconds in taken.items()}


def _merge(by_index: dict[int, list[float]]) -> Quantity:
    """One figure for all occurrences of an op: the mean of their medians, since a step has their sum."""
    spread = Quantity.measured([s for seconds in by_index.values() for s in seconds], "s")
    value = statistics.fmean(statistics.median(seconds) for seconds in by_index.values())
    low, high = min(spread.low, value), max(spread.high, value)
    return msgspec.structs.replace(spread, value=value, low=low, high=high)


def _mean_of_peers(
    mine: Mapping[str, Quantity], keys: Collection[str], peers: Peers
) -> dict[str, Quantity]:
    """Seconds by key, averaged over the workers; ops that failed on any of them are left out."""
    # NaN passes through sums, so one worker's failure shows in the mean of all.
    missing = Quantity.assumed(float("nan"), "s")
    quantities = [mine.get(key, missing) for key in keys]
    rows = peers.gather([v for q in quantities for v in (q.value, q.low, q.high)])
    means = iter([statistics.fmean(column) for column in zip(*rows, strict=True)])
    found: dict[str, Quantity] = {}
    for key, value, low, high in zip(keys, means, means, means, strict=True):
        if key in mine and not math.isnan(value):
            found[key] = msgspec.structs.replace(
                mine[key], value=value, low=low, high=high, n=mine[key].n * peers.size
            )
    return found
