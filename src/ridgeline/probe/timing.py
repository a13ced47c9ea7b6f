"""Timing of blocks and functions: synchronised with the device, medians with quartiles."""

import sys
import time
from collections.abc import Callable
from typing import Any, Self, TextIO

import torch

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.machine import Quantity
from ridgeline.recording.turns import call_s, calls_in

BLOCK_S = 2e-3
"""Calls faster than this are timed in blocks, so that reading the clock does not count."""


class Measurement(Value, frozen=True, kw_only=True):
    """How long one call takes: median and quartiles in seconds over `n` samples."""

    name: str
    median_s: float
    low_s: float
    high_s: float
    n: int

    @classmethod
    def of(cls, name: str, samples_s: list[float]) -> Self:
        """Median and quartiles of samples in seconds; needs at least one."""
        q = Quantity.measured(samples_s, "s")
        return cls(name=name, median_s=q.value, low_s=q.low, high_s=q.high, n=q.n)

    def __repr__(self) -> str:
        return (
            f"{self.name}: {units.seconds(self.median_s)} "
            f"({units.seconds(self.low_s)} .. {units.seconds(self.high_s)}, n={self.n})"
        )


class Benchmark:
    """Times a `with` block and prints it, or times calls of a function.

        with rl.benchmark("eager"):            # prints `eager: 1.2769 sec`
            for _ in range(1000): net(x)
        rl.benchmark("net").time(net, x)       # a Measurement

    Made by `rl.benchmark`. `seconds` is that of the last block; 0.0 before there was one.
    """

    def __init__(self, name: str, *, stream: TextIO | None = None) -> None:
        self.name = name
        self.seconds = 0.0
        self._stream = stream
        self._start = 0.0

    def __enter__(self) -> Self:
        synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            return  # a block that failed was not timed
        synchronize()
        self.seconds = time.perf_counter() - self._start
        stream = sys.stdout if self._stream is None else self._stream
        stream.write(f"{self.name}: {self.seconds:.4f} sec\n")

    def time(self, fn: Callable[..., Any], *args: Any, seconds: float = 0.5) -> Measurement:
        """How long `fn(*args)` takes: two calls to warm up, then samples for about `seconds`.

        With CUDA initialised, the time is that between events on the current stream, so kernels
        that were only issued count too.

        Cost: Synchronises the device after every sample.
        """
        return Measurement.of(self.name, sample(lambda: fn(*args), seconds=seconds))


def benchmark(name: str = "Done", *, stream: TextIO | None = None) -> Benchmark:
    """A timer for a `with` block (prints `name: 1.2769 sec`) or, by `.time(fn, *args)`, for calls.

    Args:
        name: What is timed.
        stream: Where the line of a block goes; None is standard output.
    """
    return Benchmark(name, stream=stream)


def sample(
    fn: Callable[[], Any], *, seconds: float, least: int = 5, most: int = 200
) -> list[float]:
    """Seconds per call of `fn`, sampled for about `seconds`: `least` to `most` samples.

    A call that takes so long that `least` samples would need ten times `seconds` gets fewer, at
    least one.

    Cost: Two calls to warm up; synchronises the device after every sample.
    """
    calls = _block(fn)
    samples: list[float] = []
    start = time.perf_counter()
    while len(samples) < most:
        samples.append(time_block(fn, calls))
        elapsed = time.perf_counter() - start
        # The second bound is for calls of which the least samples would take minutes.
        if elapsed > 10 * seconds or (elapsed > seconds and len(samples) >= least):
            break
    return samples


def device_seconds(launch: Callable[[], object]) -> float:
    """Seconds on the GPU of what is launched on the current stream, by events around it.

    Cost: Waits for it.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def time_block(fn: Callable[[], Any], calls: int) -> float:
    """Mean seconds per call over one block of `calls` calls.

    Cost: Synchronises the device before and after.
    """

    def block() -> None:
        for _ in range(calls):
            fn()

    # Not where nobody has used a GPU: asking would make a context, and take its memory.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        synchronize()
        return device_seconds(block) / calls
    return call_s(fn, calls)


def synchronize() -> None:
    """Wait for every GPU that this process has memory on; nothing to do on the CPU."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):
                torch.cuda.synchronize(index)


def _block(fn: Callable[[], Any]) -> int:
    """Calls per block, so that a block lasts `BLOCK_S`; two calls warm up first."""
    fn()
    once = time_block(fn, 1)
    return calls_in(BLOCK_S, once)
