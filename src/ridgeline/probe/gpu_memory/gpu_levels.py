"""Levels of a GPU's memory, and what fills its multiprocessors, by the sizes and blocks that are tried.

What takes the time is given (`GpuLoops`); on a GPU those of `gpu_loops`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Protocol

import msgspec

from ridgeline.codec import Value
from ridgeline.errors import MachineError
from ridgeline.machine import Machine, Setting
from ridgeline.machine.gpu_levels import (
    BlocksCurve,
    BlocksPoint,
    GpuBlocks,
    GpuLevels,
    GpuSizes,
    GpuStair,
    GpuStairs,
    SizedRate,
)
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.fields import FieldProbe, measured_apart, with_fields
from ridgeline.probe.host.memory_levels import enough

SMALLEST, SMALLEST_READ, LARGEST = 16 << 10, 256 << 10, 4 << 30
"""Bytes walked through, and read, at least, and both at most: from within the cache of one multiprocessor to
far beyond the cache of the whole GPU (50 MiB of an H200, 126 MiB of a B200)."""
READ_BY_BLOCKS = 1 << 30
THREADS = 256
"""Of a block of the kernels whose blocks are counted: what most operators of torch take."""
READING = (2, 1024)
"""Blocks of each multiprocessor, and their threads, that read a level: all that fit (2048 threads)."""
BLOCKS_EACH = (1, 2, 3, 4, 6, 8, 16, 32)
"""Blocks of each multiprocessor: up to all that fit at once (8 of 256 threads), and whole waves."""
WORD_BYTES, LOADS_AT_ONCE = 16, 4
SHARED_BYTES = 64
"""That a thread reads of shared memory in one pass."""
SAMPLES, SAMPLE_S = 11, 2e-3
"""A sample is a hundred times what a launch takes."""
LEAST_LOADS = 1 << 12
Field = Literal["stairs", "blocks", "sizes"]


class GpuLoops(Protocol):
    """What a GPU is asked; all that is timed returns seconds on the GPU."""

    @property
    def multiprocessors(self) -> int:
        """How many there are."""

    @property
    def cache_bytes(self) -> int:
        """Of the cache of the whole GPU."""

    @property
    def room_bytes(self) -> int:
        """The most that may be taken of its memory."""

    def lay(self, num_bytes: int) -> None:
        """Lay a random walk through all lines of so many bytes, which `access` follows."""

    def access(self, loads: int) -> float:
        """So many loads, each of which waits for the one before it."""

    def read(self, num_bytes: int, blocks: int, threads: int, loads: int) -> float:
        """Four times so many loads of 16 bytes by each thread; the next call goes on behind them."""

    def multiply_add(self, blocks: int, threads: int, operations: int) -> float:
        """So many multiply-adds by each thread, each of which waits for the one before it."""

    def read_shared(self, blocks: int, threads: int, passes: int) -> float:
        """So many times 64 bytes of shared memory by each thread."""

    def scale(self, num_bytes: int, least: int) -> list[float]:
        """Samples of a tensor of 32-bit floats that is multiplied in place."""


class FieldReply(GpuLevels, frozen=True, kw_only=True):
    """What a worker found of one field, or why it found nothing."""

    reason: str = ""


def with_gpu_levels(
    machine: Machine, keep: Callable[[Machine], Machine], say: Callable[[str], None]
) -> Machine:
    """The profile with what it lacks of `Machine.gpu`, kept after each field; without a GPU as it is.

    Arguments as of `fields.with_fields`.

    Cost: the first GPU for about 5 s, of whose memory 4 GiB or a quarter of what is free are taken, and a
        process for each field, which starts in seconds. Where kernels cannot be compiled, sizes alone are
        measured, and a warning says so.
    """
    if machine.device_kind != "cuda":
        return machine
    names: dict[Field, str] = {
        "stairs": "levels of memory",
        "blocks": "rates by blocks",
        "sizes": "an operator by size",
    }
    probes = [FieldProbe(field, name, partial(_asked, field)) for field, name in names.items()]
    return with_fields(machine, "gpu", probes, keep, say, "GPU")


def in_worker(request: bytes) -> bytes:
    """Target of `run_in_group`: one field, measured on the current GPU, as JSON of a `FieldReply`."""
    from ridgeline.probe.gpu_memory.gpu_loops import CudaLoops

    try:
        reply = replied(request.decode(), CudaLoops())
    except MachineError as error:
        reply = FieldReply(reason=str(error))
    return msgspec.json.encode(reply)


def replied(field: str, loops: GpuLoops) -> FieldReply:
    """One field, measured with these loops.

    Raises:
        MachineError: the loops cannot be had.
    """
    match field:
        case "stairs":
            return FieldReply(stairs=measure_stairs(loops))
        case "blocks":
            return FieldReply(blocks=measure_blocks(loops))
        case _:
            return FieldReply(sizes=measure_sizes(loops))


def measure_stairs(loops: GpuLoops) -> GpuStairs:
    """Latency and bandwidth by the bytes that are used, powers of two.

    Raises:
        MachineError: the loops cannot be had.
    """
    threads = READING[0] * loops.multiprocessors * READING[1]

    def read(num_bytes: int) -> Sampled | None:
        if num_bytes < SMALLEST_READ:
            return None
        moved = threads * LOADS_AT_ONCE * WORD_BYTES
        blocks = READING[0] * loops.multiprocessors
        return _rate(partial(loops.read, num_bytes, blocks, READING[1]), moved, "B/s")

    def access(num_bytes: int) -> Sampled:
        loops.lay(num_bytes)
        # After the walk was laid, which warms the level that is asked for.
        loads = enough(loops.access, LEAST_LOADS, SAMPLE_S)
        return Sampled.measured([loops.access(loads) / loads for _ in range(SAMPLES)], "s")

    return GpuStairs(
        cache_bytes=loops.cache_bytes,
        stairs=tuple(
            GpuStair(num_bytes=size, access=access(size), read=read(size))
            for size in powers(SMALLEST, min(LARGEST, loops.room_bytes))
        ),
    )


def measure_blocks(loops: GpuLoops) -> GpuBlocks:
    """Multiply-adds and reads of memory by the number of blocks, and reads of shared memory by all.

    Raises:
        MachineError: the loops cannot be had.
    """
    # Far beyond the caches, so that blocks are counted against main memory.
    num_bytes = powers(SMALLEST, min(READ_BY_BLOCKS, loops.room_bytes))[-1]

    def multiply_adds(blocks: int) -> Sampled:
        flops = 2 * blocks * THREADS
        return _rate(partial(loops.multiply_add, blocks, THREADS), flops, "FLOP/s")

    def reads(blocks: int) -> Sampled:
        moved = blocks * THREADS * LOADS_AT_ONCE * WORD_BYTES
        return _rate(partial(loops.read, num_bytes, blocks, THREADS), moved, "B/s")

    counts = numbers_of_blocks(loops.multiprocessors)
    blocks, threads = READING[0] * loops.multiprocessors, READING[1]
    shared_bytes = blocks * threads * SHARED_BYTES
    return GpuBlocks(
        multiprocessors=loops.multiprocessors,
        curves=(_curve("multiply-add", counts, multiply_adds), _curve("read", counts, reads)),
        shared=_rate(partial(loops.read_shared, blocks, threads), shared_bytes, "B/s"),
    )


def measure_sizes(loops: GpuLoops) -> GpuSizes:
    """What an operator that reads and writes a tensor reaches by its size; without any kernel of our own."""
    points: list[SizedRate] = []
    for size in powers(SMALLEST_READ, min(LARGEST, loops.room_bytes)):
        rates = [2 * size / taken for taken in loops.scale(size, SAMPLES)]
        points.append(SizedRate(num_bytes=size, rate=Sampled.measured(rates, "B/s")))
    return GpuSizes(call="mul_ of float32", points=tuple(points))


def powers(least: int, most: int) -> tuple[int, ...]:
    """The powers of two from `least`, itself one, up to `most`; `least` in any case."""
    return tuple(
        1 << power for power in range(least.bit_length() - 1, max(least, most).bit_length())
    )


def numbers_of_blocks(multiprocessors: int) -> tuple[int, ...]:
    """1, 2, 4 ... up to one on each multiprocessor, then whole numbers on each."""
    few = (1 << power for power in range(multiprocessors.bit_length()))
    return tuple(sorted({*few, *(each * multiprocessors for each in BLOCKS_EACH)}))


def _asked(field: Field) -> Value:
    """What a fresh process finds of a field on the first GPU; a MachineError where it finds nothing."""
    # In a process of its own: a kernel that fails takes its context with it.
    one = Setting(device="cuda", threads=1)
    text = measured_apart(f"{__name__}:in_worker", field.encode(), one)
    reply = msgspec.json.decode(text, type=FieldReply)
    found: Value | None = getattr(reply, field)
    if found is None:
        raise MachineError(reply.reason)
    return found


def _rate(run: Callable[[int], float], work: float, unit: str) -> Sampled:
    """Samples of a loop that does a given amount of work in each turn."""
    turns = enough(run, 1, SAMPLE_S)
    return Sampled.measured([work * turns / run(turns) for _ in range(SAMPLES)], unit)


def _curve(
    work: Literal["multiply-add", "read"], counts: Sequence[int], rate: Callable[[int], Sampled]
) -> BlocksCurve:
    points = tuple(BlocksPoint(blocks=blocks, rate=rate(blocks)) for blocks in counts)
    return BlocksCurve(work=work, threads_per_block=THREADS, points=points)
