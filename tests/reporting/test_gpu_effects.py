"""What a GPU gives by size and by blocks, as people read it: tables, sentences and charts."""

import msgspec
import pytest
from plotly_figures import taken_by_plotly
from sample_machine import make_machine, sampled

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
from ridgeline.reporting.effects.gpu_effects import gpu_effects
from ridgeline.reporting.page.page_gpu import (
    gpu_blocks_figure,
    gpu_charts,
    gpu_latency_figure,
    gpu_rates_figure,
)
from ridgeline.reporting.page.page_machine import machine_section

MIB = 1 << 20


def stair(num_bytes: int, access_s: float, read: float | None) -> GpuStair:
    return GpuStair(
        num_bytes=num_bytes,
        access=sampled(access_s, "s"),
        read=None if read is None else sampled(read, "B/s"),
    )


STAIRS = GpuStairs(
    cache_bytes=50 * MIB,
    stairs=(stair(MIB, 4e-8, None), stair(16 * MIB, 2e-7, 6e12), stair(1024 * MIB, 8e-7, 4e12)),
)
BLOCKS = GpuBlocks(
    multiprocessors=132,
    curves=(
        BlocksCurve(
            work="multiply-add",
            threads_per_block=256,
            points=tuple(
                BlocksPoint(blocks=blocks, rate=sampled(rate, "FLOP/s"))
                for blocks, rate in ((1, 1e11), (132, 1.5e13), (264, 3e13), (528, 3.01e13))
            ),
        ),
        BlocksCurve(
            work="read",
            threads_per_block=256,
            points=tuple(
                BlocksPoint(blocks=blocks, rate=sampled(rate, "B/s"))
                for blocks, rate in ((1, 1e11), (528, 4e12))
            ),
        ),
    ),
    shared=sampled(3e13, "B/s"),
)
SIZES = GpuSizes(
    call="mul_ of float32",
    points=tuple(
        SizedRate(num_bytes=size, rate=sampled(rate, "B/s"))
        for size, rate in ((MIB, 8e11), (32 * MIB, 3.7e12), (1024 * MIB, 4e12))
    ),
)
KNOWN = GpuLevels(stairs=STAIRS, blocks=BLOCKS, sizes=SIZES)


def test_levels() -> None:
    """Latency and bandwidth by size, and what the cache is worth to the next operator."""
    (effect,) = gpu_effects(GpuLevels(stairs=STAIRS))
    assert effect.rows == (
        ("1.00 MiB", "40.0 ns", "10.0 %", "", "", "5"),
        ("16.0 MiB", "200 ns", "10.0 %", "6.00 TB/s", "10.0 %", "5"),
        ("1.00 GiB", "800 ns", "10.0 %", "4.00 TB/s", "10.0 %", "5"),
    )
    assert effect.reading == (
        "A load that waits for another takes 40.0 ns in 1.00 MiB and 800 ns in 1.00 GiB. All "
        "multiprocessors together read 6.00 TB/s from the cache of the GPU (L2, 50.0 MiB) and 4.00 TB/s "
        "from memory behind it: a tensor that is still in the cache when the next operator reads it is read "
        "1.50 x as fast."
    )
    alone = msgspec.structs.replace(STAIRS, stairs=STAIRS.stairs[:1])
    (effect,) = gpu_effects(GpuLevels(stairs=alone))
    assert effect.reading == (
        "A load that waits for another takes 40.0 ns in 1.00 MiB and 40.0 ns in 1.00 MiB."
    )


def test_blocks() -> None:
    """Each kernel in its columns, and its knee in blocks and threads."""
    (effect,) = gpu_effects(GpuLevels(blocks=BLOCKS))
    assert effect.head == (
        "Blocks of 256 threads", "Multiply-adds", "Spread", "Reads of memory", "Spread"
    )  # fmt: skip
    assert effect.rows == (
        ("1", "100 GFLOP/s", "10.0 %", "100 GB/s", "10.0 %"),
        ("132", "15.0 TFLOP/s", "10.0 %", "", ""),
        ("264", "30.0 TFLOP/s", "10.0 %", "", ""),
        ("528", "30.1 TFLOP/s", "10.0 %", "4.00 TB/s", "10.0 %"),
    )
    assert effect.reading == (
        "Multiply-adds no longer gain from 264 blocks on (512 threads on each of 132 multiprocessors), at "
        "30.1 TFLOP/s. Reads of memory no longer gain from 528 blocks on (1024 threads on each of 132 "
        "multiprocessors), at 4.00 TB/s. A kernel of fewer blocks leaves the rest of the GPU to other "
        "kernels, or idle. Memory that a block shares is read at 30.0 TB/s by all blocks together."
    )


def test_sizes() -> None:
    """Rate and seconds by size, and from which on the memory is what limits."""
    (effect,) = gpu_effects(GpuLevels(sizes=SIZES))
    assert effect.rows[0] == ("1.00 MiB", "800 GB/s", "10.0 %", "2.62 us", "5")
    assert effect.reading == (
        "mul_ of float32 reaches nine tenths of the bandwidth of memory, 4.00 TB/s, from tensors of 32.0 "
        "MiB on; of 1.00 MiB it gets 800 GB/s, since a kernel takes microseconds to start and end. Smaller "
        "tensors are worth merging."
    )


@pytest.mark.parametrize(
    ("figure", "names"),
    [
        (gpu_rates_figure(KNOWN), ["read by all multiprocessors", "mul_ of float32"]),
        (gpu_rates_figure(GpuLevels(sizes=SIZES)), ["mul_ of float32"]),
        (gpu_latency_figure(STAIRS), ["a load that waits for the one before"]),
        (gpu_blocks_figure(BLOCKS), ["multiply-add", "read"]),
    ],
)
def test_charts_are_figures(figure: dict[str, object], names: list[str]) -> None:
    """With a line for each that was measured."""
    assert [trace.name for trace in taken_by_plotly(figure).data] == names


def test_blocks_are_drawn_as_shares_of_the_best() -> None:
    """So that both kernels have one axis."""
    arithmetic, reading = gpu_blocks_figure(BLOCKS)["data"]
    assert arithmetic["y"] == pytest.approx([1 / 301, 150 / 301, 300 / 301, 1.0])
    assert reading["x"] == [1, 528]


def test_the_page_has_tables_and_charts_of_what_was_measured() -> None:
    """And nothing of a GPU where there is none."""
    page = str(machine_section(msgspec.structs.replace(make_machine(), gpu=KNOWN), None))
    for title in (*(effect.title for effect in gpu_effects(KNOWN)), "GPU latency by size"):
        assert title.replace("'", "&#x27;") in page or title.replace("'", "&#39;") in page
    assert "GPU" not in str(machine_section(make_machine(), None))
    assert len(list(gpu_charts(KNOWN))) == 3
    assert len(list(gpu_charts(GpuLevels(blocks=BLOCKS)))) == 1
