"""How fast one core multiplies and adds in vectors of each width that it has, and how often a cycle."""

import platform
from collections.abc import Callable
from typing import NamedTuple

import torch

from ridgeline.machine.microarchitecture import VectorRate, Vectors
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.host.memory_levels import SHORT_S, enough
from ridgeline.probe.host.processors import flags
from ridgeline.probe.native import VECTOR_BITS, library, multiply_adds
from ridgeline.probe.turns import in_turns, ratio

ROUNDS, LEAST_S = 61, 3.0
FLOAT_BITS = 32
AT_ONCE = 48
"""Multiply-adds that the loops do at least."""
PER_TURN = 16
"""Additions of a turn of the loop that shows the clock."""
CLOCK_TURNS = 60_000
"""About 0.3 ms: the clock that wide vectors slow down stays so for longer than that.

Source: Intel 64 and IA-32 Architectures Optimization Reference Manual, on licence levels (about 0.7 ms).
"""
WORDS = {128: ("sse2", "asimd"), 256: ("avx",), 512: ("avx512f",)}
"""What processors call these widths among their flags."""


def measure_vectors() -> Vectors:
    """Multiply-adds of 32-bit floats by the width of the vectors, of one core.

    Raises:
        MachineError: there is no C compiler to make the loops with.

    Cost: one core for about 3 s.
    """
    loops = multiply_adds()
    found = in_turns({bits: _timed(run, bits) for bits, run in loops.items()}, ROUNDS, LEAST_S)
    rates = {bits: tuple(one.rate for one in samples) for bits, samples in found.items()}
    return Vectors(
        rates=tuple(
            VectorRate(
                bits=bits,
                rate=Sampled.measured(rates[bits], "FLOP/s"),
                per_cycle=Sampled.measured([one.rate / one.clock for one in samples], "FLOP/cycle"),
                gain=ratio(rates[bits], rates[FLOAT_BITS]),
            )
            for bits, samples in found.items()
        ),
        clock=Sampled.measured([one.clock for each in found.values() for one in each], "Hz"),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        missing=tuple(why_missing(bits, flags()) for bits in VECTOR_BITS if bits not in loops),
    )


def why_missing(bits: int, known: frozenset[str]) -> str:
    """Why there is no rate for a width.

    `known` are flags of the processor.
    """
    words = WORDS.get(bits, ())
    if known.isdisjoint(words):
        return f"{bits} bit: the processor ({platform.machine()}) has none of {', '.join(words)}"
    return f"{bits} bit: the compiler makes no such instructions for this processor"


class ClockedSample(NamedTuple):
    """A sample in FLOP/s, and the clock of the core right behind it, in Hz."""

    rate: float
    clock: float


def _timed(run: Callable[[int], float], bits: int) -> Callable[[], ClockedSample]:
    """A function that takes a sample."""
    operations = enough(run, AT_ONCE, SHORT_S)
    flops = 2 * (bits // FLOAT_BITS) * operations
    additions = library().ridgeline_additions

    def sample() -> ClockedSample:
        # The clock is read right behind it: wide vectors lower it, and only for a while.
        rate = flops / run(operations)
        return ClockedSample(rate, PER_TURN * CLOCK_TURNS / additions(CLOCK_TURNS))

    return sample
