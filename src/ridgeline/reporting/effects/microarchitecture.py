"""What a host does to memory access and arithmetic, in tables and sentences for terminal and page."""

from ridgeline import units
from ridgeline.machine.microarchitecture import (
    FalseSharing,
    Microarchitecture,
    Nodes,
    Pages,
    Strides,
    Vectors,
)
from ridgeline.machine.quantity import Quantity
from ridgeline.machine.stairs import WORD_BYTES
from ridgeline.reporting.effects.cells import seconds, with_spread
from ridgeline.reporting.grid import Grid
from ridgeline.reporting.labels import as_sentence, spread, times


def host_effects(known: Microarchitecture) -> tuple[Grid, ...]:
    """Those that were measured."""
    found = (
        None if known.strides is None else _strides(known.strides),
        None if known.pages is None else _pages(known.pages),
        None if known.false_sharing is None else _false_sharing(known.false_sharing),
        None if known.vectors is None else _vectors(known.vectors),
        None if known.nodes is None else _nodes(known.nodes),
    )
    return tuple(effect for effect in found if effect is not None)


def _strides(strides: Strides) -> Grid:
    first, last = strides.points[0], strides.points[-1]
    rows = tuple(
        (
            units.num_bytes(point.stride_bytes),
            *seconds(point.in_order),
            *seconds(point.at_random),
            times(point.at_random.value / point.in_order.value),
        )
        for point in strides.points
    )
    reading = (
        f"Over {units.num_bytes(strides.num_bytes)}, a load every {units.num_bytes(last.stride_bytes)} costs "
        f"{times(last.in_order.value / first.in_order.value)} as much as one every "
        f"{units.num_bytes(first.stride_bytes)}, and at random "
        f"{times(last.at_random.value / first.in_order.value)}; operators on transposed or sliced tensors "
        "pay the first, lookups of single values the second."
    )
    head = ("Stride", "In order", "Spread", "At random", "Spread", "Random / in order")
    return Grid("Loads by stride", head, rows, reading)


def _pages(pages: Pages) -> Grid:
    waiting, independent = pages.waiting, pages.independent
    small = units.num_bytes(pages.small_page_bytes)
    rows = [_page_row(small, waiting.small, independent.small)]
    if not (waiting.large and waiting.gain and independent.large and independent.gain):
        reading = f"No large pages: {pages.reason}."
    else:
        size = pages.large_page_bytes
        large = "large" if size is None else units.num_bytes(size)
        rows.append(_page_row(large, waiting.large, independent.large))
        reading = (
            f"In small pages a load at random in {units.num_bytes(pages.num_bytes)} takes "
            f"{with_spread(waiting.gain)} as long as in large where it waits for the one before it, and "
            f"{with_spread(independent.gain)} where none waits; embedding tables and cached samples pay "
            "this, unless large ones are requested (from torch's allocator by THP_MEM_ALLOC_ENABLE=1)."
        )
    head = ("Page", "Load that waits", "Spread", "Independent load", "Spread", "Samples")
    return Grid("Pages", head, tuple(rows), reading)


def _page_row(page: str, waiting: Quantity, independent: Quantity) -> tuple[str, ...]:
    return page, *seconds(waiting), *seconds(independent), str(waiting.n)


def _false_sharing(sharing: FalseSharing) -> Grid:
    rows = tuple(
        (units.num_bytes(one.distance_bytes), *seconds(one.increment), str(one.increment.n))
        for one in sharing.counters
    )
    if not sharing.slowdowns:
        reading = f"Not measured: {sharing.reason}."
    else:
        than = " and ".join(
            f"{with_spread(slowdown)} slower than {units.num_bytes(one.distance_bytes)} apart"
            # The first are those in one line, which the others are compared with.
            for slowdown, one in zip(sharing.slowdowns, sharing.counters[1:], strict=True)
        )
        one, other = sharing.cores
        reading = (
            f"Two counters in one cache line, of cores {one} and {other}, are {than}; data loaders and "
            "threads whose counters, flags or sums share a line pay this at every write."
        )
    head = ("Counters apart", "Increment", "Spread", "Samples")
    return Grid("False sharing", head, rows, reading)


def _vectors(vectors: Vectors) -> Grid:
    rows = tuple(
        (
            f"{one.bits} bit" if index else "one float",
            units.quantity(one.rate.value, one.rate.unit),
            spread(one.rate),
            units.digits3(one.per_cycle.value),
            times(one.gain.value),
            str(one.rate.n),
        )
        for index, one in enumerate(vectors.rates)
    )
    # By the rate: on some processors the widest vectors lower the clock, and are no gain.
    best = max(vectors.rates, key=lambda one: one.rate.value)
    missing = f" {'; '.join(vectors.missing)}." if vectors.missing else ""
    reading = (
        f"In vectors of {best.bits} bit one core multiplies and adds {with_spread(best.gain)} as fast as "
        f"one float at a time, at {units.quantity(vectors.clock.value, 'Hz')}; operators that are not "
        f"vectorised pay this. torch's own kernels use {vectors.torch_capability}.{missing}"
    )
    head = ("Vector", "Multiply-add", "Spread", "FLOP a cycle", "Gain", "Samples")
    return Grid("Width of vectors", head, rows, reading)


def _nodes(nodes: Nodes) -> Grid:
    rows = [
        (f"{node.index}: {node.cores} cores, {units.num_bytes(node.memory_bytes)}", "", "", "", "")
        for node in nodes.nodes
    ]
    rows += [
        (
            f"cores of {path.cores_of}, memory of {path.memory_of}",
            *seconds(path.access),
            units.quantity(WORD_BYTES / path.word.value, "B/s"),
            spread(path.word),
        )
        for path in nodes.paths
    ]
    near, far = (
        [path for path in nodes.paths if (path.cores_of == path.memory_of) == is_near]
        for is_near in (True, False)
    )
    if not near or not far:
        alike = ": all memory is as near to each core, and nothing was measured"
        rest = alike if len(nodes.nodes) == 1 else ""
        reading = as_sentence(f"{nodes.reason}{rest}")
    else:
        # The worst of each, as a scheduler that knows no nodes may meet it.
        worst_far, worst_near = (max(one.access.value for one in paths) for paths in (far, near))
        slow = worst_far / worst_near
        reading = (
            f"A load from another node takes up to {times(slow)} as long as one from the core's own; a "
            "worker whose threads leave the node where its memory was first written pays this."
            f"{f' Doubtful: {nodes.reason}.' if nodes.reason else ''}"
        )
    head = ("Node", "Load", "Spread", "Read in order", "Spread")
    return Grid("Nodes of memory (NUMA)", head, tuple(rows), reading)
