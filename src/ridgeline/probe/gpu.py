"""What only GPUs have: launch cost, CUDA graph replay, and a clock of their own."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ridgeline.machine import Dispatch, DispatchPhase
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.timing import device_seconds, sample, time_block
from ridgeline.recording.turns import call_s

LAUNCHES = 1000
QUEUED = 64
"""Calls that are queued behind a sleeping GPU for one sample."""
LONG_S = 1e-3
"""A call that takes longer keeps the GPU busy while the host issues the next one."""
GRAPH_KERNELS = (64, 512)
SMALL_ELEMENTS = 1 << 18
"""Of a small kernel that has a block for each part of the GPU: one of two blocks starts before the last one
ends. Source: an H200, where kernels of 64 blocks and more are 0.3 to 0.5 us apart in a graph."""


def measure_launch(device: torch.device, *, quick: bool) -> tuple[Dispatch, ...]:
    """Seconds of an eager launch, of issuing a graph, its start, and what each of its kernels still costs."""
    rounds = 4 if quick else 8
    launch = _eager_launch(torch.zeros(1, device=device), rounds)
    costs = _graph_costs(device, rounds)
    return (Dispatch(device="cuda", phase="launch", seconds=launch), *costs)


def small_kernels(device: torch.device) -> list[Callable[[], object]]:
    """Calls that launch one small kernel each, all of them different.

    Each kernel of a step follows another one, whose code and arguments the GPU has at hand; one that follows
    itself starts some 0.3 us sooner.
    """
    x = torch.ones(SMALL_ELEMENTS, device=device)
    functions = (torch.neg, torch.exp, torch.tanh, torch.sqrt, torch.sigmoid, torch.log1p)
    more = (torch.reciprocal, torch.square, torch.erf, torch.floor)
    return [
        lambda: x.add_(1.0),
        lambda: x.fill_(1.0),
        lambda: x.to(torch.bfloat16),
        lambda: torch.maximum(x, x),
        *(functools.partial(function, x) for function in (*functions, *more)),
    ]


def sleep(cycles: int) -> None:
    """Let the current stream do nothing for `cycles` of the GPU's clock, so that work queues up behind."""
    torch.cuda._sleep(cycles)  # noqa: SLF001 - torch has no public way to hold a stream up


def kernel_samples(call: Callable[[], object], *, seconds: float, least: int = 3) -> list[float]:
    """Seconds of a call on the GPU among others of its kind, sampled for about `seconds`.

    A small kernel takes less than its launch, so the calls of a sample are queued while the GPU sleeps: what
    is timed is the rate of the device, as in a replayed graph or behind a host that is ahead.

    Cost: Synchronises the device at every sample.
    """
    call()
    # After a first call, which loads the kernel.
    alone_s = time_block(call, 1)
    if alone_s > LONG_S:
        return sample(call, seconds=seconds, least=least)

    def queued() -> None:
        for _ in range(QUEUED):
            call()

    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < least or time.perf_counter() - start < seconds:
        # Else the sleep would begin behind what is still queued, and end too early.
        torch.cuda.synchronize()
        sleep(Ruler.SLEEP_CYCLES)
        samples.append(device_seconds(queued) / QUEUED)
    return samples


class Ruler:
    """Times operators on the GPU with events, without the gaps that a slow host would leave.

    The GPU first sleeps while the host queues a run of operators, so they start back to back. Between
    events a kernel takes longer than among other kernels; the difference, found with small kernels of
    many kinds, is taken off.
    """

    RUN = 64
    """Operators queued per sleep."""
    SLEEP_CYCLES = 16_000_000
    """About 8 ms: most hosts queue a run of operators in less; doubled where one does not."""
    LONGEST_SLEEP_CYCLES = 256_000_000

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued = self.RUN
        self._cycles = self.SLEEP_CYCLES
        self._woke: torch.cuda.Event | None = None
        self._slept_at = self._paced_at = 0.0
        self.floor_s = 0.0
        # Of graphs, in which small kernels follow each other as they do in a step.
        kernels_s = statistics.median(_replays(device, 4).kernel_s[1:])
        self.floor_s = max(0.0, self.small_kernel_s() - kernels_s)

    def small_kernel_s(self) -> float:
        """Seconds of a small kernel, the mean of many kinds."""
        calls = small_kernels(self._device)
        taken = self.measure(calls * (4 * self.RUN // len(calls)))
        # Kind by kind: a mean over all would weigh disturbed samples, a median only the middle kind.
        return statistics.fmean(
            statistics.median(taken[index :: len(calls)]) for index in range(len(calls))
        )

    def mark(self) -> torch.cuda.Event:
        """An event recorded now on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def pace(self) -> bool:
        """Call before every operator: puts the GPU to sleep again when a run is over, or when it woke early.

        It wakes early behind an operator that waits for it, or when the host was held up; what was queued
        last may then have started late.

        Returns:
            Whether the operator before this one may have waited for the host.

        Cost: Synchronises the device once per run.
        """
        was_late = self.is_awake()
        now = time.perf_counter()
        if was_late or self._queued >= self.RUN:
            # A host that is slow is so at every operator; one that waited for the GPU, at the last.
            waited_s, whole_s = now - self._paced_at, now - self._slept_at
            self.hold(is_slow=was_late and waited_s < 0.25 * whole_s)
        self._queued += 1
        self._paced_at = time.perf_counter()
        return was_late

    def hold(self, *, is_slow: bool | None = None) -> bool:
        """Wait for what was queued and put the GPU to sleep; whether it had been awake before that.

        Args:
            is_slow: Sleep twice as long from now on; None: if it had been awake.

        Cost: Synchronises the device.
        """
        was_awake = self.is_awake()
        if was_awake if is_slow is None else is_slow:
            # Doubled for good: a host that is slow now will be so at the next run.
            self._cycles = min(2 * self._cycles, self.LONGEST_SLEEP_CYCLES)
        torch.cuda.synchronize(self._device)
        sleep(self._cycles)
        self._woke = torch.cuda.Event()
        self._woke.record()
        self._queued = 0
        self._slept_at = time.perf_counter()
        return was_awake

    def is_awake(self) -> bool:
        """Whether the GPU has begun with what was queued since it was last put to sleep."""
        return self._woke is not None and self._woke.query()

    def restart(self) -> None:
        """What was queued is done: the next operator begins a run."""
        self._queued, self._woke = self.RUN, None

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Time between two events that have happened, less what the events add to a kernel's time."""
        return max(0.0, begin.elapsed_time(end) * 1e-3 - self.floor_s)

    def measure(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Seconds of each call on the GPU."""
        marks = []
        for call in calls:
            self.pace()
            begin = self.mark()
            call()
            marks.append((begin, self.mark()))
        torch.cuda.synchronize(self._device)
        self.restart()
        return [self.seconds(begin, end) for begin, end in marks]


def _eager_launch(x: torch.Tensor, rounds: int) -> Sampled:
    # On one element: the device is done long before the host has issued the next.
    launch = functools.partial(x.add_, 1.0)
    samples = [call_s(launch, LAUNCHES, torch.cuda.synchronize) for _ in range(rounds)]
    # Without the first round, in which clocks rise.
    return Sampled.measured(samples[1:], "s")


def _graph_costs(device: torch.device, rounds: int) -> tuple[Dispatch, ...]:
    """Two graphs of different length tell the cost of each kernel, of a start, and of issuing one."""
    replays = _replays(device, rounds)
    # A timed operator has the cost of one kernel's start and end in it already (see `Ruler`), so only
    # what a kernel costs beyond that is left to add.
    ruler = Ruler(device)
    kernel_s = ruler.small_kernel_s()
    gaps = [max(0.0, slope - kernel_s) for slope in replays.kernel_s[1:]]
    costs: dict[DispatchPhase, list[float]] = {
        "graph_replay": replays.issue_s,
        "graph_start": replays.start_s,
        "graph_kernel": gaps,
    }
    return tuple(
        Dispatch(device="cuda", phase=phase, seconds=Sampled.measured(samples[1:], "s"))
        for phase, samples in costs.items()
    )


class _Replays(NamedTuple):
    """Seconds round by round: of each kernel of a replayed graph, of its start, and of issuing it."""

    kernel_s: list[float]
    start_s: list[float]
    issue_s: list[float]


def _replays(device: torch.device, rounds: int) -> _Replays:
    """Replays of a short and a long graph; the first round warms up."""
    graphs = [_graph(device, kernels) for kernels in GRAPH_KERNELS]
    found = _Replays([], [], [])
    for _ in range(rounds):
        seconds = []
        for graph in graphs:
            torch.cuda.synchronize()
            start = time.perf_counter()
            graph.replay()
            issued_s = time.perf_counter() - start
            # Several in a row, so that what the events add weighs little.
            in_a_row_s = device_seconds(lambda graph=graph: [graph.replay() for _ in range(10)])
            seconds.append(in_a_row_s / 10)
        # The difference of two lengths is free of the start, which both have once.
        kernel_s = (seconds[1] - seconds[0]) / (GRAPH_KERNELS[1] - GRAPH_KERNELS[0])
        found.kernel_s.append(kernel_s)
        found.start_s.append(max(0.0, seconds[0] - kernel_s * GRAPH_KERNELS[0]))
        found.issue_s.append(issued_s)
    return found


def _graph(device: torch.device, kernels: int) -> torch.cuda.CUDAGraph:
    calls = small_kernels(device)
    for call in calls:
        # Lazy loading of a kernel is not allowed in a capture.
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in itertools.islice(itertools.cycle(calls), kernels):
            call()
    return graph
