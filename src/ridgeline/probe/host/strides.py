"""What a load costs by its distance to the one before it: in order, and the same words at random."""

import ctypes

from ridgeline.machine.microarchitecture import StridePoint, Strides
from ridgeline.machine.quantity import Sampled
from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.probe.host.memory_levels import LINE_BYTES, SHORT_S, Mapped, Run, Sample, enough
from ridgeline.probe.native import library
from ridgeline.probe.turns import in_turns

STRIDES = tuple(1 << power for power in range(3, 13))
"""Bytes: from the next word to the next small page."""
ROUNDS, LEAST_S = 31, 6.0
LEAST_LOADS = 1 << 14


def measure_strides(num_bytes: int) -> Strides:
    """Seconds a load, by stride.

    `num_bytes` are read: a power of two, far more than caches hold.

    Raises:
        MachineError: there is no C compiler to make the loops with.

    Cost: one core for about 7 s, and so much memory.
    """
    library()  # before memory is taken
    with Mapped(num_bytes) as memory:
        memory.words[:] = 1  # what was never written is one page of zeros, wherever it is read
        readers = {stride: StrideReader(memory, num_bytes, stride) for stride in STRIDES}
        loops: dict[tuple[int, str], Sample] = {}
        for stride, reader in readers.items():
            loops[stride, "in order"] = _timed(reader.in_order)
            loops[stride, "at random"] = _timed(reader.at_random)
        found = in_turns(loops, ROUNDS, LEAST_S)
    return Strides(
        num_bytes=num_bytes,
        points=tuple(
            StridePoint(
                stride_bytes=stride,
                in_order=Sampled.measured(found[stride, "in order"], "s"),
                at_random=Sampled.measured(found[stride, "at random"], "s"),
            )
            for stride in STRIDES
        ),
    )


def timed_at_random(memory: Mapped, num_bytes: int) -> Sample:
    """A function that takes a sample: seconds of a load of a word of any line, none waiting for another.

    `num_bytes` of the memory are read; a power of two.
    """
    return _timed(StrideReader(memory, num_bytes, LINE_BYTES).at_random)


def _timed(run: Run) -> Sample:
    loads = enough(run, LEAST_LOADS, SHORT_S)
    return lambda: run(loads) / loads


class StrideReader:
    """Reads one word of every stride; each call goes on where the one before ended.

    Bytes and strides, of at least a word, are powers of two.
    """

    def __init__(self, memory: Mapped, num_bytes: int, stride_bytes: int) -> None:
        self._address = memory.address
        self._stride_bytes = stride_bytes
        self._count = num_bytes // stride_bytes
        self._done = 0
        self._lines = max(1, stride_bytes // LINE_BYTES)
        self._drawn = ctypes.c_uint64(stride_bytes)

    @property
    def _pass_address(self) -> int:
        """Where this pass begins: another line than the passes before it.

        Of each stride only one line is read. A second pass over the same ones might find them in a cache,
        since all together they are few: 16 MiB of 1 GiB where the stride is 4 KiB. Neighbours are far apart
        in time, since processors fetch lines in pairs.
        """
        # Odd, so that it meets all lines, whose number is a power of two.
        step = (self._lines // 2 + 1) | 1
        line = self._done // self._count * step % self._lines
        return self._address + line * LINE_BYTES

    def in_order(self, loads: int) -> float:
        """Seconds of `loads` loads from low addresses to high ones."""
        read, stride, taken = library().ridgeline_stride, self._stride_bytes // WORD_BYTES, 0.0
        while loads > 0:
            at = self._done % self._count
            part = min(loads, self._count - at)
            taken += read(self._pass_address + at * self._stride_bytes, part, stride, 1)
            self._done += part
            loads -= part
        return taken

    def at_random(self, loads: int) -> float:
        """Seconds of `loads` loads of the words of a pass, drawn one by one."""
        stride = self._stride_bytes // WORD_BYTES
        taken: float = library().ridgeline_draw(
            self._pass_address, self._count, stride, loads, ctypes.byref(self._drawn)
        )
        self._done += self._count
        return taken
