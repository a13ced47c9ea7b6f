"""Ceilings: the best rates that one worker reaches while all workers of a setting run."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ridgeline.machine import Ceiling, CurvePoint, Setting
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.gpu import kernel_samples
from ridgeline.probe.groups.peers import Peers
from ridgeline.probe.timing import sample

Job = tuple[float, Callable[[], object]]
"""Work of one call (FLOP or bytes) and the call."""

_MIB = 1 << 20
QUICK_S, FULL_S = 0.01, 0.07
"""Seconds that a visit spends on each point of a curve."""
SLOW_S = 0.06
"""A curve ends with the first size that takes longer than this: larger ones would tell nothing new."""
DRAWN = 1 << 16
"""Values that are drawn for a tensor; a larger one repeats them."""


def measure_ceilings(setting: Setting, peers: Peers, *, quick: bool) -> tuple[Ceiling, ...]:
    """Matrix products, convolutions, elementwise operators and copies over their sizes, in one visit.

    Source: rates are medians over samples of the best size; elementwise counts two reads and one
    write, copies one read and one write.
    """
    curve = partial(_curve, setting, peers, QUICK_S if quick else FULL_S)
    found = []
    for dtype in _dtypes(setting):
        with _precision(dtype):
            found.append(curve("matmul", dtype, _matmuls(setting, dtype, quick)))
            found.append(curve("convolution", dtype, _convolutions(setting, dtype)))
        if dtype != "tf32":  # a way to multiply, not to store
            found.append(curve("elementwise", dtype, _elementwise(setting, dtype, quick)))
    found.append(curve("memory", "float32", _copies(setting, quick)))
    return tuple(found)


def _curve(
    setting: Setting, peers: Peers, seconds: float, family: str, dtype: str, jobs: Iterator[Job]
) -> Ceiling:
    """Time one job after the other, all peers at once, until they become slow."""
    take = kernel_samples if setting.device == "cuda" else sample
    unit = "B/s" if family in ("elementwise", "memory") else "FLOP/s"
    curve: list[CurvePoint] = []
    rates: list[Sampled] = []
    for work, call in jobs:
        # Before it is run at all: three calls at the last rate must not take long either.
        if rates and not peers.agree(work / max(rates[-1].samples) < 2 * SLOW_S):
            break
        peers.barrier()
        # Two at least: of a single one nobody knows what disturbed it.
        samples = take(call, seconds=seconds, least=2)
        rates.append(Sampled.measured([work / taken for taken in samples], unit))
        curve.append(CurvePoint(work=work, rate=rates[-1].value))
        if not peers.agree(min(samples) < SLOW_S):
            break
    # What memory sustains is its rate at the largest size; smaller ones run in cache.
    best = rates[-1] if family == "memory" else max(rates, key=lambda rate: rate.value)
    return Ceiling(setting=setting, family=family, dtype=dtype, rate=best, curve=tuple(curve))


def _dtypes(setting: Setting) -> tuple[str, ...]:
    if setting.device == "cuda":
        return ("float32", "tf32", "bfloat16", "float16")
    return ("float32", "bfloat16")


@contextmanager
def _precision(dtype: str) -> Iterator[None]:
    """TF32 on for the pseudo-dtype `tf32` and off otherwise; put back as it was afterwards."""
    if not torch.cuda.is_available():
        yield
        return
    backends: Any = torch.backends
    # By their newer names: torch refuses to say by the older ones what a script has set by these.
    operators = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
    before = [operator.fp32_precision for operator in operators]
    try:
        for operator in operators:
            operator.fp32_precision = "tf32" if dtype == "tf32" else "ieee"
        yield
    finally:
        for operator, precision in zip(operators, before, strict=True):
            operator.fp32_precision = precision


def _tensor(setting: Setting, dtype: str, *shape: int) -> Tensor:
    stored = getattr(torch, "float32" if dtype == "tf32" else dtype)
    count = math.prod(shape)
    # Random values: hardware runs faster and cooler on zeros. Drawing all of a large tensor would take a CPU
    # longer than the samples.
    block = torch.empty(min(count, DRAWN), device=setting.device, dtype=stored).uniform_(-1, 1)
    return block.repeat(-(-count // len(block)))[:count].view(shape)


def _matmuls(setting: Setting, dtype: str, quick: bool) -> Iterator[Job]:
    sizes = (64, 128, 256, 512, 1024) if quick else (32, 64, 128, 256, 512, 1024, 2048)
    if setting.device == "cuda":
        sizes = (256, 512, 1024, 2048, 4096, 8192)
    for size in sizes:
        a, b = _tensor(setting, dtype, size, size), _tensor(setting, dtype, size, size)
        # Written into a tensor that is there, so that no page faults are in the rate.
        out = torch.empty_like(a)
        yield 2.0 * size**3, lambda a=a, b=b, out=out: torch.mm(a, b, out=out)


def _convolutions(setting: Setting, dtype: str) -> Iterator[Job]:
    """3x3 convolutions of equal channels, as residual networks have them."""
    shapes = ((4, 32, 16), (8, 64, 28), (16, 128, 28))
    if setting.device == "cuda":
        shapes = ((8, 64, 28), (32, 64, 56), (64, 128, 56), (128, 256, 56))
    for samples, channels, size in shapes:
        x = _tensor(setting, dtype, samples, channels, size, size)
        weight = _tensor(setting, dtype, channels, channels, 3, 3)
        # As such networks are trained: cuDNN's fastest kernels want it.
        if setting.device == "cuda":
            x = x.to(memory_format=torch.channels_last)
            weight = weight.to(memory_format=torch.channels_last)
        work = 2.0 * samples * size * size * channels * channels * 9
        yield work, lambda x=x, w=weight: torch.nn.functional.conv2d(x, w, padding=1)


def _elementwise(setting: Setting, dtype: str, quick: bool) -> Iterator[Job]:
    """Sums of two tensors, from sizes within the nearest cache to sizes beyond every cache."""
    sizes = [1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 3 << 25]
    if setting.device == "cuda":
        sizes = [1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30]
    elif quick:
        # The ends stay: within the caches, and far beyond.
        del sizes[1:-1:2]
    for num_bytes in sizes:
        width = getattr(torch, dtype).itemsize
        elements = num_bytes // (3 * width)
        a, b = _tensor(setting, dtype, elements), _tensor(setting, dtype, elements)
        out = torch.empty_like(a)
        yield 3.0 * elements * width, lambda a=a, b=b, out=out: torch.add(a, b, out=out)


def _copies(setting: Setting, quick: bool) -> Iterator[Job]:
    sizes = [1 * _MIB, 128 * _MIB] if quick else [_MIB, 8 * _MIB, 32 * _MIB, 256 * _MIB]
    if setting.device == "cuda":
        sizes = [16 * _MIB, 256 * _MIB, 2048 * _MIB]
    for num_bytes in sizes:
        a = _tensor(setting, "float32", num_bytes // 8)
        out = torch.empty_like(a)
        yield float(num_bytes), lambda a=a, out=out: out.copy_(a)
