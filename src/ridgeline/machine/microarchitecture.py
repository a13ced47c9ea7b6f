"""What a host does to memory access and arithmetic: strides, pages, shared lines, vectors and nodes.

`Microarchitecture` holds one value for each; all of them come with a full measurement.
"""

from ridgeline.codec import Value
from ridgeline.machine.quantity import Sampled


class StridePoint(Value, frozen=True, kw_only=True):
    """Seconds a load of 8 bytes, one every `stride_bytes`, none waiting for another.

    `in_order` from low addresses to high ones, so that the processor fetches ahead; `at_random` the same
    words in any order.
    """

    stride_bytes: int
    in_order: Sampled
    at_random: Sampled


class Strides(Value, frozen=True, kw_only=True):
    """What a load costs by the distance to the one before it, over `num_bytes`; strides ascend."""

    num_bytes: int
    points: tuple[StridePoint, ...]


class PageLoads(Value, frozen=True, kw_only=True):
    """Seconds of a load at random in small pages and in large.

    `gain` is `small` over `large`, of samples that were taken in turns. Both are None without large pages.
    """

    small: Sampled
    large: Sampled | None = None
    gain: Sampled | None = None


class Pages(Value, frozen=True, kw_only=True):
    """What loads at random in `num_bytes` cost by the size of the pages that they are in.

    `waiting` are loads each of which waits for the one before it, `independent` those of which none does.
    """

    num_bytes: int
    small_page_bytes: int
    large_page_bytes: int | None = None
    """None where the system does not say, or gives none."""
    waiting: PageLoads
    independent: PageLoads
    reason: str = ""
    """Why there are no large ones; empty where there are."""


class CountersApart(Value, frozen=True, kw_only=True):
    """Seconds of an atomic increment while another core increments a counter so many bytes away."""

    distance_bytes: int
    increment: Sampled


class FalseSharing(Value, frozen=True, kw_only=True):
    """Two cores that increment a counter each; distances ascend, and the first is within a line.

    `slowdowns` are, for each further distance, the seconds within a line over those at that distance, of
    samples that were taken in turns. Where two cores could not be had nothing is known but the `reason`.
    """

    cores: tuple[int, ...] = ()
    """Numbers of the two, as the system counts."""
    counters: tuple[CountersApart, ...] = ()
    slowdowns: tuple[Sampled, ...] = ()
    reason: str = ""


class VectorRate(Value, frozen=True, kw_only=True):
    """What one core reaches in multiply-adds of 32-bit floats in vectors of `bits`; 32 is one float."""

    bits: int
    rate: Sampled
    """FLOP/s; a multiply-add counts two for each float."""
    per_cycle: Sampled
    """FLOP a cycle, by the clock that each sample was followed by."""
    gain: Sampled
    """Over one float at a time, of samples that were taken in turns."""


class Vectors(Value, frozen=True, kw_only=True):
    """The widths of vectors that a core computes in; they ascend.

    `clock` is that of the core while it did so: additions that wait for each other take a cycle each.
    `torch_capability` is what torch's own kernels use. `missing` says of other widths why not.
    """

    rates: tuple[VectorRate, ...]
    clock: Sampled
    torch_capability: str
    missing: tuple[str, ...] = ()


class Node(Value, frozen=True, kw_only=True):
    """Cores that are near to a part of the memory, and how much of it there is."""

    index: int
    cores: int
    memory_bytes: int


class NodePath(Value, frozen=True, kw_only=True):
    """Seconds that memory of one node costs a core of another.

    `access` is a load that waits for another, `word` 8 bytes of those that are read in order.
    """

    cores_of: int
    memory_of: int
    access: Sampled
    word: Sampled


class Nodes(Value, frozen=True, kw_only=True):
    """The nodes of a host with non-uniform memory access (NUMA), and each path between two of them.

    `num_bytes` were walked through on each. Paths are absent where `reason` says why.
    """

    nodes: tuple[Node, ...]
    paths: tuple[NodePath, ...] = ()
    num_bytes: int = 0
    reason: str = ""


class Microarchitecture(Value, frozen=True, kw_only=True):
    """What a host does to memory access and arithmetic; None: not measured so far."""

    strides: Strides | None = None
    pages: Pages | None = None
    false_sharing: FalseSharing | None = None
    vectors: Vectors | None = None
    nodes: Nodes | None = None
