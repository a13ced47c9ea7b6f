"""The two tables: every algorithm and every compression that a plan may name, and which of them run where.

They are dictionaries on purpose: an entry that is assigned here is accepted in plans, searched, simulated,
measured for, run and labelled. A word without transport or codec is known and refused by name.

What is said of words that do not run holds by definition; it is settled when they run.
"""

import math
from typing import TYPE_CHECKING

from ridgeline.synchronisation.entries import (
    Algorithm,
    Compression,
    Option,
    Options,
    OptionValue,
    Passes,
    Traffic,
    WireBytes,
)
from ridgeline.synchronisation.searched import (
    as_the_backend,
    hosts_are_one,
    kernels_are_unmeasured,
    links_are_shared,
    where_rings_are_short,
)

if TYPE_CHECKING:
    from ridgeline.plan import Sync

DEFAULT_ALGORITHM = "all_reduce"
UNCOMPRESSED = "none"

SCALE_BYTES = 4
"""One float32 scale beside the elements of a bucket."""
INDEX_BYTES = 4
"""The position of an element of a bucket."""
PIECES = Option("pieces", int, 0, least=0, most=64)
"""Into how many pieces a share of a bucket is cut, so that adding overlaps sending; 0: by its bytes."""


def _in_two_halves(payload_bytes: int, workers: int) -> tuple[Traffic, ...]:
    """Each worker reduces its share, then all gather the shares.

    Source: Patarasuk, Yuan, JPDC 69(2), 2009; the same for sharded optimizers, Rajbhandari et al., SC 2020.
    """
    return Traffic("reduce_scatter", payload_bytes), Traffic("all_gather", payload_bytes)


def _up_and_down(payload_bytes: int, workers: int) -> tuple[Traffic, ...]:
    """The payload goes up a tree and comes down it; up takes what down does.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005: the messages of a reduce are a broadcast's.
    """
    return Traffic("broadcast", payload_bytes), Traffic("broadcast", payload_bytes)


def _bits_per_element(bits: int, scale_bytes: int = 0) -> WireBytes:
    """The payload of codecs that keep every element, in so many bits, and perhaps a scale a bucket."""

    def wire_bytes(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
        return -(-num_elements * bits // 8) + (scale_bytes if num_elements else 0)

    return wire_bytes


def _unchanged(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    return num_elements * element_bytes


def _top_k(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """The largest elements, and where they stand.

    Source: Lin et al., "Deep gradient compression", ICLR 2018.
    """
    kept = math.ceil(float(options["density"]) * num_elements)
    return kept * (element_bytes + INDEX_BYTES)


def _power_sgd(num_elements: int, element_bytes: int, workers: int, options: Options) -> int:
    """Two factors of a matrix, taken to be square, and never more than the matrix.

    Source: Vogels et al., "PowerSGD", NeurIPS 2019: rank (rows + columns) elements.
    """
    side = math.isqrt(max(0, num_elements - 1)) + 1 if num_elements else 0
    return min(2 * side * int(options["rank"]), num_elements) * element_bytes


def _residual(num_elements: int, element_bytes: int, options: Options) -> int:
    """What was left out of a step and is added in the next: error feedback, Karimireddy et al., ICML 2019."""
    return num_elements * element_bytes


ALGORITHMS: dict[str, Algorithm] = {
    entry.name: entry
    for entry in (
        Algorithm(
            name=DEFAULT_ALGORITHM,
            label="all-reduce",
            frame="all_reduce",
            transport="ridgeline.runtime.sync.all_reduce:AllReduce",
            devices=("cpu", "cuda"),
        ),
        Algorithm(
            name="ring",
            label="ring",
            frame="ring",
            transport="ridgeline.runtime.sync.ring:Ring",
            devices=("cpu", "cuda"),
            options=(PIECES,),
            unsearched=as_the_backend,
        ),
        Algorithm(
            name="rings",
            label="rings",
            frame="rings",
            transport="ridgeline.runtime.sync.rings:Rings",
            devices=("cpu", "cuda"),
            options=(Option("orders", str, ""), PIECES),
            unsearched=links_are_shared,
        ),
        Algorithm(
            name="tree",
            label="tree",
            frame="tree",
            transport="ridgeline.runtime.sync.tree:Tree",
            devices=("cpu", "cuda"),
            traffic=_up_and_down,
            unsearched=where_rings_are_short,
        ),
        Algorithm(
            name="hierarchical",
            label="hierarchical",
            frame="hierarchical",
            transport="ridgeline.runtime.sync.hierarchical:Hierarchical",
            devices=("cpu", "cuda"),
            options=(Option("local", int, 0, least=0), PIECES),
            least_workers=4,
            unsearched=hosts_are_one,
        ),
        Algorithm(
            name="two_shot",
            label="two-shot",
            frame="two_shot",
            transport="ridgeline.runtime.sync.two_shot:TwoShot",
            devices=("cuda",),
            options=(
                Option("one_shot_bytes", int, 1 << 18, least=0),
                Option("most_bytes", int, 10 << 20, least=0),
            ),
            unsearched=kernels_are_unmeasured,
        ),
        Algorithm(name="sharded", label="sharded", frame="sharded", traffic=_in_two_halves),
        Algorithm(
            name="kvstore",
            label="key-value store",
            frame="kvstore",
            options=(Option("asynchronous", bool, False, is_exact=False),),
        ),
    )
}
"""Word in `Sync.algorithm` to what it means, in the order in which plans with them are compared."""

COMPRESSIONS: dict[str, Compression] = {
    entry.name: entry
    for entry in (
        Compression(
            name=UNCOMPRESSED,
            label="uncompressed",
            wire_bytes=_unchanged,
            devices=("cpu", "cuda"),
            is_exact=True,
        ),
        Compression(
            name="fp16",
            label="fp16",
            wire_bytes=_bits_per_element(16),
            codec_passes=Passes(1.5, 1.5),
        ),
        Compression(
            name="bf16",
            label="bf16",
            wire_bytes=_bits_per_element(16),
            codec_passes=Passes(1.5, 1.5),
        ),
        Compression(
            name="fp8",
            label="fp8",
            wire_bytes=_bits_per_element(8, SCALE_BYTES),
            codec_passes=Passes(2.25, 1.25),
            exchange="scatter",
        ),
        Compression(
            name="int8",
            label="int8",
            wire_bytes=_bits_per_element(8, SCALE_BYTES),
            codec_passes=Passes(2.25, 1.25),
            exchange="scatter",
        ),
        Compression(
            name="topk",
            label="top-k",
            wire_bytes=_top_k,
            codec_passes=Passes(4.0, 1.0),
            exchange="gather",
            has_state=True,
            state_bytes=_residual,
            options=(Option("density", float, 0.01, least=0.0, most=1.0),),
        ),
        Compression(
            name="powersgd",
            label="PowerSGD",
            wire_bytes=_power_sgd,
            codec_passes=Passes(5.0, 1.0),
            has_state=True,
            state_bytes=_residual,
            options=(Option("rank", int, 4, least=1),),
        ),
        Compression(
            name="sign",
            label="sign",
            wire_bytes=_bits_per_element(1, SCALE_BYTES),
            codec_passes=Passes(4.0, 1.0),
            exchange="gather",
            has_state=True,
            state_bytes=_residual,
        ),
    )
}
"""Word in `Sync.compression` to what it means.

Source of `codec_passes`: counted, for float32 gradients. The bucket is read once for a scale and once to
encode, the payload is written, and with error feedback the residual is read and written.
"""


def offered(device: str) -> tuple[str, ...]:
    """The algorithms that run on `cpu` or `cuda`, in the order of the table."""
    return tuple(
        name for name, entry in ALGORITHMS.items() if entry.runs and device in entry.devices
    )


def offered_compressions(device: str) -> tuple[str, ...]:
    """The compressions that run on `cpu` or `cuda`, in the order of the table."""
    return tuple(
        name for name, entry in COMPRESSIONS.items() if entry.runs and device in entry.devices
    )


def unsearched(device: str, workers: int) -> dict[str, str]:
    """The exact algorithms that run with so many workers and that no search compares: why, by name."""
    reasons = {
        name: ALGORITHMS[name].unsearched(device, workers)
        for name in offered(device)
        if ALGORITHMS[name].is_exact and workers >= ALGORITHMS[name].least_workers
    }
    return {name: reason for name, reason in reasons.items() if reason}


def options_of(sync: "Sync") -> tuple[Option, ...]:
    """The options that a plan's algorithm and its compression have."""
    return (*ALGORITHMS[sync.algorithm].options, *COMPRESSIONS[sync.compression].options)


def values_of(sync: "Sync") -> dict[str, OptionValue]:
    """The value of each of those options: the plan's, or the default."""
    return {
        option.name: sync.options.get(option.name, option.default) for option in options_of(sync)
    }


def is_exact(sync: "Sync") -> bool:
    """Whether what each worker takes a step with is the plain mean of this step's gradients."""
    values = values_of(sync)
    return (
        ALGORITHMS[sync.algorithm].is_exact
        and COMPRESSIONS[sync.compression].is_exact
        and sync.every == 1
        and all(o.is_exact or values[o.name] == o.default for o in options_of(sync))
    )
