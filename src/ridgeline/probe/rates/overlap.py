"""How much computing and communicating slow each other when both run at once."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ridgeline.machine import Overlap, Setting
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.gpu import sleep
from ridgeline.probe.groups.peers import Peers

MESSAGE_BYTES = 4 << 20
BUCKET_BYTES = 25 << 20
"""On a CPU, where the link is fast: a usual bucket, which no core's cache holds."""
QUICK_MESSAGE_S = 0.01
"""On a link on which `MESSAGE_BYTES` take no longer, a round of buckets takes less than a second."""
ROUNDS = 1
"""Of a visit; in a full measurement three times as many."""
SLOW_MESSAGE_S = 0.1
"""On a link on which a message takes longer, few of them are long enough in flight."""
KERNEL_SIDES = (1024, 2048, 4096)
"""Sides of the products in half precision that GPUs compute: on an H200 about 8, 25 and 190 us, from a part
of the GPU to many times what it holds at once."""

Compute = Callable[[], object]
Transfer = Callable[[], object]
"""Enqueues one on the current stream."""


class OverlapRound(NamedTuple):
    """Slowdowns of one round, and the seconds of one call of what computes, alone."""

    compute: float
    communication: float
    call_s: float


def measure_overlap(setting: Setting, peers: Peers, *, quick: bool) -> tuple[Overlap, ...]:
    """Slowdown of computing beside back-to-back all-reduces, and the other way round.

    While both are active, computing runs at `1 / compute_slowdown` of its speed alone, and
    communication at `1 / communication_slowdown`. 1.0 is perfect overlap; 2.0 for both means that
    nothing is gained by running them at once. Messages are of 4 MiB, on a CPU with a fast link of 25 MiB.

    Returns:
        On CPUs one; on GPUs one for each of `KERNEL_SIDES`.
    """
    rounds = (1 if quick else 3) * ROUNDS
    if peers.device.type == "cpu":
        return (_measure(setting, computing_mix(), peers, rounds),)
    return tuple(
        _measure(setting, product(side, peers.device), peers, rounds) for side in KERNEL_SIDES
    )


def _measure(setting: Setting, compute: Compute, peers: Peers, rounds: int) -> Overlap:
    message = _message(peers)
    compute()  # warms up
    found = [beside_all_reduces(compute, message, peers) for _ in range(rounds)]
    compute_x, transfer_x = computing_slowdowns(found, peers), transfer_slowdowns(found, peers)
    kernel = None
    if peers.device.type == "cuda":
        kernel = Sampled.measured(_of_all([one.call_s for one in found], peers), "s")
        gain = None  # each side was measured by itself
    else:
        gain = Sampled.measured(gains(compute_x, transfer_x), "x")
    return Overlap(
        setting=setting,
        compute_slowdown=Sampled.measured(compute_x, "x"),
        communication_slowdown=Sampled.measured(transfer_x, "x"),
        kernel=kernel,
        gain=gain,
    )


def _message(peers: Peers) -> torch.Tensor:
    """What is sent: on a CPU with a fast link a bucket."""
    if peers.device.type != "cpu":
        return torch.zeros(MESSAGE_BYTES // 4, device=peers.device)
    bucket = torch.zeros(BUCKET_BYTES // 4, device="cpu")
    small = bucket[: MESSAGE_BYTES // 4]
    dist.all_reduce(small, group=peers.group)  # connects
    start = time.perf_counter()
    dist.all_reduce(small, group=peers.group)
    return bucket if peers.agree(time.perf_counter() - start < QUICK_MESSAGE_S) else small


def rounds_of(together: Callable[[], OverlapRound], rounds: int) -> list[OverlapRound]:
    """So many rounds; one before them warms up."""
    together()
    return [together() for _ in range(rounds)]


def computing_slowdowns(found: Sequence[OverlapRound], peers: Peers) -> list[float]:
    """What computing loses: on GPUs of all workers, on CPUs of each round that of the slowest worker.

    There threads share cores unevenly, and all wait for it.
    """
    # Below 1 is noise: neither side gains by the other.
    mine = [max(1.0, one.compute) for one in found]
    if peers.device.type != "cpu":
        return _of_all(mine, peers)
    return [max(values) for values in zip(*peers.gather(mine), strict=True)]


def transfer_slowdowns(found: Sequence[OverlapRound], peers: Peers) -> list[float]:
    """What transferring loses, of all workers."""
    return _of_all([max(1.0, one.communication) for one in found], peers)


def gains(compute_x: Sequence[float], transfer_x: Sequence[float]) -> list[float]:
    """Of each round, what was done at once over the same one after the other."""
    rounds = len(compute_x)
    transfers = [statistics.fmean(transfer_x[r::rounds]) for r in range(rounds)]
    return [1.0 / compute + 1.0 / sent for compute, sent in zip(compute_x, transfers, strict=True)]


def _of_all(mine: list[float], peers: Peers) -> list[float]:
    return [value for row in peers.gather(mine) for value in row]


def beside_all_reduces(compute: Compute, message: torch.Tensor, peers: Peers) -> OverlapRound:
    """One round of computing beside all-reduces of a message; every peer calls this."""
    if peers.device.type == "cpu":
        return _together_on_cpu(compute, message, peers)
    return beside_on_stream(compute, lambda: dist.all_reduce(message, group=peers.group), peers)


def computing_mix() -> Compute:
    """Convolution, matrix product and elementwise work on the CPU, about a millisecond."""
    x = torch.rand(4, 32, 28, 28, device="cpu")
    weight = torch.rand(32, 32, 3, 3, device="cpu")
    a = torch.rand(256, 256, device="cpu")

    def run() -> None:
        torch.nn.functional.conv2d(x, weight, padding=1).relu_()
        torch.mm(a, a)

    return run


def product(side: int, device: torch.device) -> Compute:
    """One kernel on a GPU."""
    a = torch.rand(side, side, device=device, dtype=torch.float16)
    return lambda: torch.mm(a, a)


def _together_on_cpu(compute: Compute, message: torch.Tensor, peers: Peers) -> OverlapRound:
    """Rates in the window in which all-reduces are in flight, by rates alone."""
    peers.barrier()
    compute_s = seconds_of_call(0.08, compute)
    peers.barrier()
    start = time.perf_counter()
    # One by itself tells whether eight more would take too long.
    dist.all_reduce(message, group=peers.group)
    is_slow = peers.agree(time.perf_counter() - start > SLOW_MESSAGE_S)
    count = 1 if is_slow else 8
    start = time.perf_counter()
    _wait([dist.all_reduce(message, group=peers.group, async_op=True) for _ in range(count)])
    message_s = (time.perf_counter() - start) / count
    # Enough messages to be in flight for a while; the same number on all ranks.
    least = 2 if is_slow else 6
    count = max(least, min(200, int(0.15 / max(_first(message_s, peers), 1e-6))))
    peers.barrier()
    start = time.perf_counter()
    works = [dist.all_reduce(message, group=peers.group, async_op=True) for _ in range(count)]
    done = 0
    # Computing goes on until the last message is there, so that all were beside it.
    while not works[-1].is_completed():
        compute()
        done += 1
    window = time.perf_counter() - start
    _wait(works)
    return OverlapRound(window / max(done, 1) / compute_s, window / count / message_s, compute_s)


def seconds_of_call(seconds: float, compute: Compute) -> float:
    """Seconds per call of `compute` over about `seconds`; of one call at least, whatever others take."""
    start = time.perf_counter()
    done = 0
    while not done or time.perf_counter() - start < seconds:
        compute()
        done += 1
    return (time.perf_counter() - start) / done


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _first(value: float, peers: Peers) -> float:
    """The value of rank 0, on all ranks."""
    return peers.gather([value])[0][0]


def beside_on_stream(compute: Compute, transfer: Transfer, peers: Peers) -> OverlapRound:
    """One round of kernels beside transfers, from events at the ends of the streams of both.

    Each side is measured while the other has three times as much work, so that neither ever runs alone.
    """
    side = torch.cuda.Stream(peers.device)
    compute_s = _on_streams(compute, 20, transfer, 0, side, peers)[0] / 20
    message_s = _on_streams(compute, 0, transfer, 20, side, peers)[1] / 20
    # Of rank 0 on all: numbers of calls that differ would leave collectives without peers.
    compute_s, message_s = _first(compute_s, peers), _first(message_s, peers)
    few, many = 10, 30
    messages = max(1, round(many * compute_s / message_s))
    busy_compute = _on_streams(compute, few, transfer, messages, side, peers)[0] / few
    computes = max(1, round(many * message_s / compute_s))
    busy_message = _on_streams(compute, computes, transfer, few, side, peers)[1] / few
    return OverlapRound(busy_compute / compute_s, busy_message / message_s, compute_s)


def _on_streams(
    compute: Compute,
    computes: int,
    transfer: Transfer,
    transfers: int,
    side: torch.cuda.Stream,
    peers: Peers,
) -> tuple[float, float]:
    """Seconds until the computing stream is done, and until the transferring stream is done."""
    peers.barrier()
    main = torch.cuda.current_stream(peers.device)
    begin, end, side_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    sleep(10_000_000)  # about 5 ms in which the host queues everything below
    begin.record(main)
    side.wait_event(begin)
    with torch.cuda.stream(side):
        for _ in range(transfers):
            transfer()
        side_end.record(side)
    for _ in range(computes):
        compute()
    end.record(main)
    torch.cuda.synchronize(peers.device)
    return begin.elapsed_time(end) * 1e-3, begin.elapsed_time(side_end) * 1e-3
