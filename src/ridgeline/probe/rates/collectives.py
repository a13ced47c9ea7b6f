"""Size tables of collectives over the real backend."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.machine import Collective, Operation, Setting, SizePoint
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.gpu import sleep
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.timing import device_seconds
from ridgeline.recording.turns import call_s
from ridgeline.synchronisation import operations
from ridgeline.workers import flat_collectives

QUICK_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
FULL_BYTES = tuple(1 << power for power in range(10, 29))
LEAST_ROUNDS = 2
SLOW_S, SLOW_ROUNDS = 0.05, 2
"""What takes this long varies little: two rounds are enough, and leave time for larger sizes. With the call
that told how long it takes they make three samples, of which one may be disturbed."""
LATEST_SHARE = 7.5
"""Of the wanted seconds, what the rounds that are taken in any case may take."""
MOST_ROUNDS = 35
LEAST_SIZES = 3
"""Measured however slow the link is. Small ones say little of large ones there: what buffers at both ends and
on the way hold is sent both ways at once, while of long messages one direction may wait for the other."""
LAUNCH_CYCLES = 600_000
"""About 0.3 ms of GPU clock: longer than it takes to launch two collectives."""

Measured = tuple[Operation, int]
"""An operation and its bytes."""
Calls = dict[Measured, Callable[[], object]]


def measure_collectives(
    setting: Setting, peers: Peers, *, quick: bool, seconds: float | None = None
) -> tuple[Collective, ...]:
    """Seconds by size of the collectives that a step may need, in about `seconds` (default 0.5, in full 3.5).

    Sizes and operations are taken in turns, so that drift meets all alike. A sample is the time from
    a common start until the last rank is done. Small sizes get more samples than large ones. What is too
    large for a slow link is left out: the bandwidth of the largest size holds beyond it.
    """
    budget = seconds or (0.5 if quick else 3.5)
    sizes = QUICK_BYTES if quick else FULL_BYTES
    # One for all sizes: only its beginning is sent of the smaller ones.
    buffer = torch.zeros(sizes[-1] // 4, device=peers.device)
    measured = operations(setting.device)
    calls = {(o, s): _call(o, buffer[: s // 4], peers) for o in measured for s in sizes}
    calls, rounds_of, samples = _affordable(calls, peers, LATEST_SHARE * budget / len(measured))
    end = time.perf_counter() + budget
    rounds = 0
    while peers.agree(
        rounds < LEAST_ROUNDS or (time.perf_counter() < end and rounds < MOST_ROUNDS)
    ):
        for key, call in calls.items():
            if rounds >= rounds_of[key]:
                continue
            # Small ones vary most, and cost least.
            for _ in range(4 if key[1] <= 1 << 17 else 1):
                samples[key].append(_time(call, peers))
        rounds += 1
    return tuple(
        Collective(
            setting=setting,
            operation=operation,
            backend=dist.get_backend(peers.group),
            table=tuple(
                SizePoint(num_bytes=size, seconds=_slowest(samples[operation, size], peers))
                for size in sizes
                if (operation, size) in samples
            ),
        )
        for operation in measured
    )


def _affordable(
    calls: Calls, peers: Peers, limit_s: float
) -> tuple[Calls, dict[Measured, int], dict[Measured, list[float]]]:
    """What of each operation fits into the limit (three sizes in any case), warmed up, and its samples."""
    found: Calls = {}
    rounds: dict[Measured, int] = {}
    samples: dict[Measured, list[float]] = {}
    for operation in dict.fromkeys(operation for operation, _ in calls):
        sizes = [size for name, size in calls if name == operation]
        left_s, each_s = limit_s, 0.0
        for position, size in enumerate(sizes):
            call = calls[operation, size]
            # By bytes alone: the latency in the call before does not grow, so this errs towards leaving out.
            growth = size / sizes[position - 1] if position else 1.0
            least = SLOW_ROUNDS if each_s * growth > SLOW_S else LEAST_ROUNDS
            is_taken = position < LEAST_SIZES or least * each_s * growth <= left_s
            if not peers.agree(is_taken):
                break
            call()
            each_s = _time(call, peers)
            is_slow = peers.agree(each_s > SLOW_S)
            left_s -= (SLOW_ROUNDS if is_slow else LEAST_ROUNDS) * each_s
            found[operation, size] = call
            rounds[operation, size] = SLOW_ROUNDS if is_slow else MOST_ROUNDS
            samples[operation, size] = [each_s] if is_slow else []
    return found, rounds, samples


def _call(operation: Operation, tensor: Tensor, peers: Peers) -> Callable[[], object]:
    """One collective on a tensor; of those that share it out, as far as the peers divide it."""
    length = tensor.numel() // peers.size
    whole, share = tensor[: length * peers.size], torch.zeros(length, device=peers.device)
    match operation:
        case "all_reduce":
            return partial(dist.all_reduce, tensor, group=peers.group)
        case "broadcast":
            return partial(dist.broadcast, tensor, group=peers.group, group_src=0)
        case "all_gather":
            return partial(flat_collectives.all_gather, whole, share, peers.group)
        case "reduce_scatter":
            return partial(flat_collectives.reduce_scatter, share, whole, peers.group)
        case "all_to_all":
            found = torch.zeros_like(whole)
            return partial(flat_collectives.all_to_all, found, whole, peers.group)


def _time(call: Callable[[], object], peers: Peers) -> float:
    """Seconds of one call on this rank, from a common start."""
    peers.barrier()
    if peers.device.type == "cuda":
        # A collective is queued behind work in a real step, so its launch is not part of its time;
        # the small all-reduce lines the ranks up again.
        sleep(LAUNCH_CYCLES)
        dist.all_reduce(torch.zeros(1, device=peers.device), group=peers.group)
        return device_seconds(call)
    return call_s(call)


def _slowest(samples: list[float], peers: Peers) -> Sampled:
    """Over the ranks, the latest end of every sample."""
    # A step waits for the last worker, so its end is that of the collective.
    return Sampled.measured([max(row) for row in zip(*peers.gather(samples), strict=True)], "s")
