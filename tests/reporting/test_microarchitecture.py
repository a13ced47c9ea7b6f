"""What a host does to memory access and arithmetic, as people read it: a table and a sentence for each effect."""

import msgspec
import pytest
from sample_machine import make_machine, sampled

from printed import as_text
from ridgeline.machine.microarchitecture import (
    CountersApart,
    FalseSharing,
    Microarchitecture,
    Node,
    NodePath,
    Nodes,
    PageLoads,
    Pages,
    StridePoint,
    Strides,
    VectorRate,
    Vectors,
)
from ridgeline.reporting.effects.machine_effects import machine_effects
from ridgeline.reporting.effects.microarchitecture import host_effects
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.page.page_machine import machine_section
from ridgeline.reporting.terminal.text import grid_text

GIB = 1 << 30


def strides() -> Strides:
    points = ((8, 5e-10, 1e-8), (64, 4e-9, 1.2e-8), (4096, 8e-9, 1.2e-8))
    return Strides(
        num_bytes=GIB,
        points=tuple(
            StridePoint(
                stride_bytes=size, in_order=sampled(first, "s"), at_random=sampled(second, "s")
            )
            for size, first, second in points
        ),
    )


def pages(*, is_refused: bool = False) -> Pages:
    def loads(small: float, large: float, gain: float) -> PageLoads:
        if is_refused:
            return PageLoads(small=sampled(small, "s"))
        return PageLoads(
            small=sampled(small, "s"), large=sampled(large, "s"), gain=sampled(gain, "x")
        )

    return Pages(
        num_bytes=GIB,
        small_page_bytes=4096,
        large_page_bytes=None if is_refused else 2 << 20,
        waiting=loads(3e-7, 2e-7, 1.6),
        independent=loads(3e-8, 1e-8, 3.0),
        reason="the system gave none" if is_refused else "",
    )


def sharing() -> FalseSharing:
    return FalseSharing(
        cores=(0, 4),
        counters=tuple(
            CountersApart(distance_bytes=size, increment=sampled(seconds, "s"))
            for size, seconds in ((8, 4e-8), (64, 5e-9), (128, 4e-9))
        ),
        slowdowns=(sampled(8.0, "x"), sampled(10.0, "x")),
    )


def vectors(*missing: str) -> Vectors:
    return Vectors(
        rates=tuple(
            VectorRate(
                bits=bits,
                rate=sampled(width * 1e10, "FLOP/s"),
                per_cycle=sampled(4.0 * width, "FLOP/cycle"),
                gain=sampled(width, "x"),
            )
            for bits, width in ((32, 1.0), (128, 4.0), (256, 8.0))
        ),
        clock=sampled(2.5e9, "Hz"),
        torch_capability="AVX2",
        missing=missing,
    )


def nodes(reason: str = "") -> Nodes:
    paths = {(0, 0): 1e-7, (1, 0): 2e-7, (0, 1): 1.8e-7, (1, 1): 1.1e-7}
    return Nodes(
        nodes=tuple(Node(index=index, cores=8, memory_bytes=GIB) for index in (0, 1)),
        paths=tuple(
            NodePath(
                cores_of=cores,
                memory_of=memory,
                access=sampled(seconds, "s"),
                word=sampled(1e-9, "s"),
            )
            for (cores, memory), seconds in paths.items()
        ),
        num_bytes=GIB,
        reason=reason,
    )


def one(**parts: object) -> Grid:
    """The only effect of a host of which only this is known."""
    (effect,) = host_effects(msgspec.convert(parts, Microarchitecture, from_attributes=True))
    return effect


def test_what_was_not_measured_is_not_shown() -> None:
    """In no place: not in the terminal, not on the page."""
    assert machine_effects(make_machine()) == ()
    assert "False sharing" not in str(machine_section(make_machine(), None))


def test_strides() -> None:
    """In order and at random, and what the largest costs of the smallest."""
    effect = one(strides=strides())
    assert effect.rows == (
        ("8 B", "0.500 ns", "10.0 %", "10.0 ns", "10.0 %", "20.0 x"),
        ("64 B", "4.00 ns", "10.0 %", "12.0 ns", "10.0 %", "3.00 x"),
        ("4.00 KiB", "8.00 ns", "10.0 %", "12.0 ns", "10.0 %", "1.50 x"),
    )
    assert effect.reading == (
        "Over 1.00 GiB, a load every 4.00 KiB costs 16.0 x as much as one every 8 B, and at random 24.0 x; "
        "operators on transposed or sliced tensors pay the first, lookups of single values the second."
    )


def test_pages() -> None:
    """Both sizes and the gain with its quartiles; refused, the small ones and the reason."""
    effect = one(pages=pages())
    assert effect.rows == (
        ("4.00 KiB", "300 ns", "10.0 %", "30.0 ns", "10.0 %", "5"),
        ("2.00 MiB", "200 ns", "10.0 %", "10.0 ns", "10.0 %", "5"),
    )
    assert effect.reading == (
        "In small pages a load at random in 1.00 GiB takes 1.60 x (1.52 to 1.68) as long as in large where "
        "it waits for the one before it, and 3.00 x (2.85 to 3.15) where none waits; embedding tables and "
        "cached samples pay this, unless large ones are requested (from torch's allocator by "
        "THP_MEM_ALLOC_ENABLE=1)."
    )
    refused = one(pages=pages(is_refused=True))
    assert refused.rows == effect.rows[:1]
    assert refused.reading == "No large pages: the system gave none."


def test_false_sharing() -> None:
    """How much slower than at each distance; without two cores the reason alone."""
    effect = one(false_sharing=sharing())
    assert effect.rows == (
        ("8 B", "40.0 ns", "10.0 %", "5"),
        ("64 B", "5.00 ns", "10.0 %", "5"),
        ("128 B", "4.00 ns", "10.0 %", "5"),
    )
    assert effect.reading == (
        "Two counters in one cache line, of cores 0 and 4, are 8.00 x (7.60 to 8.40) slower than 64 B apart "
        "and 10.0 x (9.50 to 10.5) slower than 128 B apart; data loaders and threads whose counters, flags "
        "or sums share a line pay this at every write."
    )
    alone = one(false_sharing=FalseSharing(reason="needs two cores"))
    assert (alone.rows, alone.reading) == ((), "Not measured: needs two cores.")


@pytest.mark.parametrize("missing", [(), ("512 bit: none",)])
def test_vectors(missing: tuple[str, ...]) -> None:
    """Rate, FLOP a cycle and gain by width, what torch uses, and why other widths are not there."""
    effect = one(vectors=vectors(*missing))
    assert effect.rows == (
        ("one float", "10.0 GFLOP/s", "10.0 %", "4.00", "1.00 x", "5"),
        ("128 bit", "40.0 GFLOP/s", "10.0 %", "16.0", "4.00 x", "5"),
        ("256 bit", "80.0 GFLOP/s", "10.0 %", "32.0", "8.00 x", "5"),
    )
    assert effect.reading == (
        "In vectors of 256 bit one core multiplies and adds 8.00 x (7.60 to 8.40) as fast as one float at a "
        "time, at 2.50 GHz; operators that are not vectorised pay this. torch's own kernels use AVX2."
        + "".join(f" {reason}." for reason in missing)
    )


def test_nodes() -> None:
    """Every node, every path, and the slowest from another node over the slowest of the core's own."""
    effect = one(nodes=nodes())
    assert effect.rows[0] == ("0: 8 cores, 1.00 GiB", "", "", "", "")
    assert effect.rows[3] == ("cores of 1, memory of 0", "200 ns", "10.0 %", "8.00 GB/s", "10.0 %")
    assert len(effect.rows) == 6
    assert effect.reading == (
        "A load from another node takes up to 1.82 x as long as one from the core's own; a worker whose "
        "threads leave the node where its memory was first written pays this."
    )
    doubtful = one(nodes=nodes("75 % of the memory of node 1 lay elsewhere"))
    assert doubtful.reading == (
        f"{effect.reading} Doubtful: 75 % of the memory of node 1 lay elsewhere."
    )


def test_one_node() -> None:
    """It is shown, and that there was nothing to measure."""
    known = Nodes(nodes=nodes().nodes[:1], reason="one node")
    effect = one(nodes=known)
    assert effect.rows == (("0: 8 cores, 1.00 GiB", "", "", "", ""),)
    assert effect.reading == (
        "One node: all memory is as near to each core, and nothing was measured."
    )
    two = one(nodes=Nodes(nodes=nodes().nodes, reason="this process may use cores of node 0 only"))
    assert two.reading == "This process may use cores of node 0 only."


def test_terminal_and_page_show_the_same() -> None:
    """Every title, cell and sentence of every effect."""
    known = Microarchitecture(
        strides=strides(), pages=pages(), false_sharing=sharing(), vectors=vectors(), nodes=nodes()
    )
    machine = msgspec.structs.replace(make_machine(), microarchitecture=known)
    page = str(machine_section(machine, None)).replace("\xa0", " ").replace("&#x27;", "'")
    shown = machine_effects(machine)
    text = " ".join(as_text(*map(grid_text, shown)).split())
    assert len(shown) == 5
    for effect in shown:
        for part in (effect.title, effect.reading, *effect.head, *sum(effect.rows, ())):
            assert part.replace("&", "&amp;") in page.replace("&#39;", "'")
            assert part in text
