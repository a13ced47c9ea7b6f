"""What two cores cost each other that write to one cache line, though neither reads what the other writes."""

import ctypes
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from ridgeline.machine.microarchitecture import CountersApart, FalseSharing
from ridgeline.machine.quantity import Sampled
from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.probe.host.memory_levels import LINE_BYTES, Mapped
from ridgeline.probe.host.processors import SYSTEM, allowed, may_pin, pinned, two_apart
from ridgeline.probe.native import library
from ridgeline.probe.turns import evenly, ratio

DISTANCES = (WORD_BYTES, 64, 128)
"""Bytes: in one line; in the next, which processors fetch in pairs; and beyond."""
GATES_AT = 16
"""Lines between the counters and the first gate."""
ROUNDS = 100
"""In one call; both threads do this many."""
LEAST_S, MOST_S = 3.0, 6.0
"""Rounds are counted for so long, and beyond where others use the cores: until there are enough."""
ENOUGH, MOST_SAMPLES = 31, 101
INCREMENTS = 10_000
"""Of a sample: a tenth of a millisecond to half of one, so that others who use the host interrupt few."""
TOGETHER = 0.9
"""Share of a sample in which both threads must have counted: interrupted, one has counted alone."""


def measure_false_sharing(system: Path = SYSTEM) -> FalseSharing:
    """Seconds of an increment by the distance to the counter that another core increments.

    Raises:
        MachineError: there is no C compiler to make the loops with.

    Cost: two cores for about 3 s.
    """
    if not may_pin():
        return FalseSharing(reason="this system does not let threads choose their cores")
    usable = allowed()
    pair = two_apart(usable, system)
    if pair is None:
        threads = f", whose {len(usable)} threads share its caches" if len(usable) > 1 else ""
        return FalseSharing(reason=f"needs two cores, and this process may use one{threads}")
    rounds: list[tuple[float, ...]] = []
    begin, num_tried = time.monotonic(), 0
    # Longer where others use the cores, since disturbed rounds are left out.
    while time.monotonic() < begin + (LEAST_S if len(rounds) >= ENOUGH else MOST_S):
        rounds += together(_count(pair))
        num_tried += ROUNDS
    if len(rounds) < 2:
        return FalseSharing(
            cores=pair,
            reason=f"other programs used cores {pair[0]} and {pair[1]}: both threads ran at once in "
            f"{len(rounds)} of {num_tried} rounds",
        )
    shared, *others = zip(*evenly(rounds, MOST_SAMPLES), strict=True)
    return FalseSharing(
        cores=pair,
        counters=tuple(
            CountersApart(distance_bytes=distance, increment=Sampled.measured(samples, "s"))
            for distance, samples in zip(DISTANCES, (shared, *others), strict=True)
        ),
        slowdowns=tuple(ratio(shared, other) for other in others),
    )


class CountingSpan(NamedTuple):
    """When a thread began to count, and when it was done; seconds of one clock."""

    begin: float
    end: float


def together(
    rounds: Sequence[Sequence[tuple[CountingSpan, CountingSpan]]],
) -> list[tuple[float, ...]]:
    """Seconds of an increment of the slower thread, of each round in which both always counted at once.

    Rounds are the spans of both threads, by distance.
    """
    return [
        tuple(max(span.end - span.begin for span in pair) / INCREMENTS for pair in spans)
        for spans in rounds
        if all(_share(*pair) >= TOGETHER for pair in spans)
    ]


def _share(one: CountingSpan, other: CountingSpan) -> float:
    """How much of the time in which either counted both did."""
    both = min(one.end, other.end) - max(one.begin, other.begin)
    return both / (max(one.end, other.end) - min(one.begin, other.begin))


def _count(cores: Sequence[int]) -> list[list[tuple[CountingSpan, CountingSpan]]]:
    """Spans of two threads that count at once, by round and distance; both meet at a gate before each."""
    count, met = library().ridgeline_count, threading.Barrier(len(cores))
    # In turns, so that the cores' clocks are the same for all distances.
    schedule = DISTANCES * (ROUNDS + 1)  # one round warms up
    with Mapped(LINE_BYTES * (len(schedule) + GATES_AT)) as memory:
        # Written before threads count, as fresh pages cost a fault each.
        memory.words[:] = 0

        def run(number: int) -> list[CountingSpan]:
            span = (ctypes.c_double * 2)()
            counter, gate = memory.address, memory.address + GATES_AT * LINE_BYTES
            found = []
            try:
                with pinned({cores[number]}):
                    met.wait()
                    for place, distance in enumerate(schedule):
                        here, at = counter + number * distance, gate + place * LINE_BYTES
                        count(here, at, len(cores), INCREMENTS, span)
                        found.append(CountingSpan(*span))
            except BaseException:
                met.abort()  # the other must not wait for a thread that could not be pinned
                raise
            return found

        with ThreadPoolExecutor(len(cores)) as pool:
            one, other = pool.map(run, range(len(cores)))
    each = len(DISTANCES)
    pairs = list(zip(one, other, strict=True))[each:]
    return [pairs[first : first + each] for first in range(0, len(pairs), each)]
