"""How much computing and communicating slow each other when both run at once."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from ridgeline.machine import Overlap, Quantity, Setting
from ridgeline.probe.gpu import sleep
from ridgeline.probe.peers import Peers

MESSAGE_BYTES = 4 << 20
ROUNDS = 3


def measure_overlap(setting: Setting, peers: Peers, *, quick: bool) -> Overlap:
    """Slowdown of computing beside back-to-back all-reduces of 4 MiB, and the other way round.

    While both are active, computing runs at `1 / compute_slowdown` of its speed alone, and
    communication at `1 / communication_slowdown`. 1.0 is perfect overlap; 2.0 for both means that
    nothing is gained by running them at once.
    """
    compute = _compute(peers.device)
    message = torch.zeros(MESSAGE_BYTES // 4, device=peers.device)
    together = _together_on_gpu if peers.device.type == "cuda" else _together_on_cpu
    slow_compute: list[float] = []
    slow_communication: list[float] = []
    for index in range((1 if quick else 3) * ROUNDS + 1):
        pair = together(compute, message, peers)
        if index:  # the first round warms up
            slow_compute.append(max(1.0, pair[0]))
            slow_communication.append(max(1.0, pair[1]))
    return Overlap(
        setting=setting,
        compute_slowdown=_merge(slow_compute, peers),
        communication_slowdown=_merge(slow_communication, peers),
    )


def _merge(samples: list[float], peers: Peers) -> Quantity:
    return Quantity.measured([value for row in peers.gather(samples) for value in row], "x")


def _compute(device: torch.device) -> Callable[[], None]:
    """A mix of convolution, matrix product and elementwise work, a few milliseconds long."""
    scale = 16 if device.type == "cuda" else 1
    x = torch.rand(4 * scale, 32, 28, 28, device=device)
    weight = torch.rand(32, 32, 3, 3, device=device)
    a = torch.rand(256 * (8 if scale > 1 else 1), 256 * (8 if scale > 1 else 1), device=device)

    def run() -> None:
        torch.nn.functional.conv2d(x, weight, padding=1).relu_()
        torch.mm(a, a)

    return run


def _together_on_cpu(
    compute: Callable[[], None], message: torch.Tensor, peers: Peers
) -> tuple[float, float]:
    """Slowdowns of one round: rates in the window in which all-reduces are in flight, by rates alone."""
    peers.barrier()
    compute_s = _until(0.08, compute)
    peers.barrier()
    count = 8
    start = time.perf_counter()
    _wait([dist.all_reduce(message, group=peers.group, async_op=True) for _ in range(count)])
    message_s = (time.perf_counter() - start) / count
    # Enough messages to be in flight for a while; the same number on all ranks.
    count = max(6, min(200, int(0.15 / max(_first(message_s, peers), 1e-6))))
    peers.barrier()
    start = time.perf_counter()
    works = [dist.all_reduce(message, group=peers.group, async_op=True) for _ in range(count)]
    done = 0
    while not works[-1].is_completed():
        compute()
        done += 1
    window = time.perf_counter() - start
    _wait(works)
    return window / max(done, 1) / compute_s, window / count / message_s


def _until(seconds: float, compute: Callable[[], None]) -> float:
    """Seconds per call of `compute` over about `seconds`."""
    start = time.perf_counter()
    done = 0
    while time.perf_counter() - start < seconds:
        compute()
        done += 1
    return (time.perf_counter() - start) / done


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _first(value: float, peers: Peers) -> float:
    """The value of rank 0, on all ranks."""
    return peers.gather([value])[0][0]


def _together_on_gpu(
    compute: Callable[[], None], message: torch.Tensor, peers: Peers
) -> tuple[float, float]:
    """Slowdowns of one round, from events at the ends of the computing and communicating streams.

    Each side is measured while the other side has three times as much to do, so that it never runs alone.
    """
    side = torch.cuda.Stream(peers.device)
    compute_s = _on_streams(compute, 20, message, 0, side, peers)[0] / 20
    message_s = _on_streams(compute, 0, message, 20, side, peers)[1] / 20
    compute_s, message_s = _first(compute_s, peers), _first(message_s, peers)
    few, many = 10, 30
    messages = max(1, round(many * compute_s / message_s))
    busy_compute = _on_streams(compute, few, message, messages, side, peers)[0] / few
    computes = max(1, round(many * message_s / compute_s))
    busy_message = _on_streams(compute, computes, message, few, side, peers)[1] / few
    return busy_compute / compute_s, busy_message / message_s


def _on_streams(
    compute: Callable[[], None],
    computes: int,
    message: torch.Tensor,
    messages: int,
    side: torch.cuda.Stream,
    peers: Peers,
) -> tuple[float, float]:
    """Seconds until the computing stream is done, and until the communicating stream is done."""
    peers.barrier()
    main = torch.cuda.current_stream(peers.device)
    begin, end, side_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    sleep(10_000_000)  # about 5 ms in which the host queues everything below
    begin.record(main)
    side.wait_event(begin)
    with torch.cuda.stream(side):
        for _ in range(messages):
            dist.all_reduce(message, group=peers.group)
        side_end.record(side)
    for _ in range(computes):
        compute()
    end.record(main)
    torch.cuda.synchronize(peers.device)
    return begin.elapsed_time(end) * 1e-3, begin.elapsed_time(side_end) * 1e-3
