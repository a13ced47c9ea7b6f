"""Levels of a GPU's memory, and what fills its multiprocessors, as tables and sentences."""

from ridgeline import units
from ridgeline.machine.gpu_levels import BlocksCurve, GpuBlocks, GpuLevels, GpuSizes, GpuStairs
from ridgeline.reporting.effects.cells import rate, seconds
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import times

USES = {"multiply-add": "Multiply-adds", "read": "Reads of memory"}


def gpu_effects(known: GpuLevels) -> tuple[Grid, ...]:
    """Those that were measured."""
    found = (
        None if known.stairs is None else _stairs(known.stairs),
        None if known.blocks is None else _blocks(known.blocks),
        None if known.sizes is None else _sizes(known.sizes),
    )
    return tuple(effect for effect in found if effect is not None)


def _stairs(known: GpuStairs) -> Grid:
    rows = tuple(
        (
            units.num_bytes(stair.num_bytes),
            *seconds(stair.access),
            *rate(stair.read),
            str(stair.access.n),
        )
        for stair in known.stairs
    )
    last, cached = known.stairs[-1], known.cached
    reading = (
        f"A load that waits for another takes {units.seconds(known.stairs[0].access.value)} in "
        f"{units.num_bytes(known.stairs[0].num_bytes)} and {units.seconds(last.access.value)} in "
        f"{units.num_bytes(last.num_bytes)}"
    )
    if cached is not None and cached.read is not None and last.read is not None:
        reading += (
            f". All multiprocessors together read {units.quantity(cached.read.value, 'B/s')} from the cache "
            f"of the GPU (L2, {units.num_bytes(known.cache_bytes)}) and "
            f"{units.quantity(last.read.value, 'B/s')} from memory behind it: a tensor that is still in the "
            f"cache when the next operator reads it is read {times(cached.read.value / last.read.value)} as "
            "fast"
        )
    head = ("Bytes used", "Load that waits", "Spread", "Read by all", "Spread", "Samples")
    return Grid("Levels of a GPU's memory", head, rows, f"{reading}.")


def _blocks(known: GpuBlocks) -> Grid:
    # Not every kernel was run with every number of blocks.
    by_blocks: dict[int, dict[str, tuple[str, str]]] = {}
    for curve in known.curves:
        for point in curve.points:
            by_blocks.setdefault(point.blocks, {})[curve.work] = rate(point.rate)
    works = [curve.work for curve in known.curves]
    rows = tuple(
        (str(blocks), *(cell for work in works for cell in found.get(work, ("", ""))))
        for blocks, found in sorted(by_blocks.items())
    )
    knees = " ".join(_knee(curve, known.multiprocessors) for curve in known.curves)
    reading = (
        f"{knees} A kernel of fewer blocks leaves the rest of the GPU to other kernels, or idle. Memory that "
        f"a block shares is read at {units.quantity(known.shared.value, 'B/s')} by all blocks together."
    )
    each = dict.fromkeys(curve.threads_per_block for curve in known.curves)
    threads = " or ".join(map(str, each))
    head = (
        f"Blocks of {threads} threads",
        *(word for work in works for word in (USES[work], "Spread")),
    )
    return Grid("Rates by blocks of a kernel", head, rows, reading)


def _knee(curve: BlocksCurve, multiprocessors: int) -> str:
    knee, best = curve.knee, curve.best
    each = knee.blocks * curve.threads_per_block / multiprocessors
    return (
        f"{USES[curve.work]} no longer gain from {knee.blocks} blocks on "
        f"({round(each)} threads on each of {multiprocessors} multiprocessors), at "
        f"{units.quantity(best.rate.value, best.rate.unit)}."
    )


def _sizes(known: GpuSizes) -> Grid:
    rows = tuple(
        (
            units.num_bytes(point.num_bytes),
            *rate(point.rate),
            # Its rate counts what is read and what is written.
            units.seconds(2 * point.num_bytes / point.rate.value),
            str(point.rate.n),
        )
        for point in known.points
    )
    first, last, knee = known.points[0], known.points[-1], known.knee
    reading = (
        f"{known.call} reaches nine tenths of the bandwidth of memory, "
        f"{units.quantity(last.rate.value, 'B/s')}, from tensors of {units.num_bytes(knee.num_bytes)} on; of "
        f"{units.num_bytes(first.num_bytes)} it gets {units.quantity(first.rate.value, 'B/s')}, since a "
        "kernel takes microseconds to start and end. Smaller tensors are worth merging."
    )
    head = ("Tensor", "Read and written", "Spread", "Kernel", "Samples")
    return Grid("An operator by the size of its tensor (GPU)", head, rows, reading)
