"""The two tables: every algorithm and every compression that a plan may name, and which of them run where.

They are dictionaries on purpose: an entry that is assigned here is accepted in plans, searched, simulated,
measured for, run and labelled. A word without transport or codec is known and refused by name.
"""

from ridgeline.synchronisation import payloads, placed, serving
from ridgeline.synchronisation.entries import (
    Algorithm,
    CollectiveTraffic,
    Compression,
    MemoryPasses,
    Option,
    Options,
    OptionValue,
)
from ridgeline.synchronisation.holding import HELD
from ridgeline.synchronisation.rhythm import rhythm_options
from ridgeline.synchronisation.searched import (
    as_the_backend,
    hosts_are_one,
    kernels_are_unmeasured,
    links_are_shared,
    memory_is_what_it_saves,
    servers_share_links,
    where_it_won,
    where_rings_are_short,
)
from ridgeline.synchronisation.sync import DEFAULT_ALGORITHM, UNCOMPRESSED, Sync

BLOCK_MULTIPLE = 32
_BARRIERS = 3
STATE_BYTES = 4
"""An element of what is remembered, in float32 whatever the gradients are."""
PIECES = Option("pieces", int, 0, least=0, most=64)
"""Into how many pieces a share of a bucket is cut, so that adding overlaps sending; 0: by its bytes."""


def _half_an_all_reduce(payload_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """Each worker reduces its part, or all gather the parts: one after the other they are an all-reduce.

    Either moves (n - 1)/n of the payload through each link, as an all-reduce of half of it does.

    Source: Patarasuk, Yuan, JPDC 69(2), 2009; the same for sharded optimizers, Rajbhandari et al., SC 2020.
    """
    return (CollectiveTraffic("all_reduce", -(-payload_bytes // 2)),)


def _behind_barriers(payload_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """Copies move what a ring does, behind barriers that take what the smallest collective does.

    Source: four H200s, buckets of 1 to 100 MiB, replayed: each took 36 to 46 us more than NCCL's all-reduce.
    """
    barrier = CollectiveTraffic("all_reduce", STATE_BYTES)
    return (CollectiveTraffic("all_reduce", payload_bytes), *[barrier] * _BARRIERS)


def _up_and_down(payload_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """The payload goes up a tree and comes down it; up takes what down does.

    Source: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005: the messages of a reduce are a broadcast's.
    """
    return (
        CollectiveTraffic("broadcast", payload_bytes),
        CollectiveTraffic("broadcast", payload_bytes),
    )


def _residual(num_elements: int, element_bytes: int, options: Options) -> int:
    """What was left out of a step and is added in the next: error feedback, Karimireddy et al., ICML 2019."""
    return num_elements * STATE_BYTES


def _residual_and_momentum(num_elements: int, element_bytes: int, options: Options) -> int:
    return num_elements * STATE_BYTES * (2 if options["momentum"] else 1)


def _residual_and_factor(num_elements: int, element_bytes: int, options: Options) -> int:
    """The factor of a step is where the next one starts from."""
    return (
        num_elements * STATE_BYTES + payloads.factors(num_elements, element_bytes, 2, options) // 2
    )


def _too_dense(workers: int, options: Options) -> str:
    """Why a density moves no fewer bytes than a ring does, of gradients in float32.

    Source: all gather (n - 1) times 8 bytes of each element that is kept; a ring, 2 (n - 1) / n
    times 4 of every one.
    """
    density = float(options["density"])
    if workers < 2 or density * workers < 1.0:
        return ""
    sent = (workers - 1) * (payloads.VALUE_BYTES + payloads.INDEX_BYTES) * density
    plain = 2 * (workers - 1) / workers * STATE_BYTES
    return (
        f"wanted sync.options['density'] < 1/{workers} = {1 / workers:.4g} with {workers} workers, got "
        f"{options['density']!r} in the plan: each worker would receive {sent:.4g} bytes for an element of a "
        f"gradient, where {plain:.4g} do without compression; lower it, or leave the compression out"
    )


def _uneven_block(workers: int, options: Options) -> str:
    """Blocks are made of what aligns gradients in buckets: 32 elements of the smallest type."""
    if int(options["block"]) % BLOCK_MULTIPLE == 0:
        return ""
    return (
        f"wanted sync.options['block'] as a multiple of {BLOCK_MULTIPLE}, got {options['block']!r} in the "
        "plan; for example 64"
    )


_TRANSPORTS = "ridgeline.runtime.sync.transports."

ALGORITHMS: dict[str, Algorithm] = {
    entry.name: entry
    for entry in (
        Algorithm(
            name=DEFAULT_ALGORITHM,
            label="all-reduce",
            frame="all_reduce",
            transport=f"{_TRANSPORTS}all_reduce:AllReduce",
            options=(HELD,),
        ),
        Algorithm(
            name="ring",
            label="ring",
            frame="ring",
            transport=f"{_TRANSPORTS}ring:Ring",
            options=(PIECES,),
            unsearched=as_the_backend,
        ),
        Algorithm(
            name="rings",
            label="rings",
            frame="rings",
            transport=f"{_TRANSPORTS}rings:Rings",
            options=(placed.ORDERS, PIECES),
            objection=placed.orders_objection,
            unsearched=links_are_shared,
        ),
        Algorithm(
            name="tree",
            label="tree",
            frame="tree",
            transport=f"{_TRANSPORTS}tree:Tree",
            traffic=_up_and_down,
            unsearched=where_rings_are_short,
        ),
        Algorithm(
            name="hierarchical",
            label="hierarchical",
            frame="hierarchical",
            transport=f"{_TRANSPORTS}hierarchical:Hierarchical",
            options=(placed.LOCAL, PIECES),
            objection=placed.local_objection,
            least_workers=4,
            unsearched=hosts_are_one,
        ),
        Algorithm(
            name="two_shot",
            label="two-shot",
            frame="two_shot",
            transport=f"{_TRANSPORTS}two_shot:TwoShot",
            devices=("cuda",),
            options=(
                Option("one_shot_bytes", int, 1 << 18, least=0),
                Option("most_bytes", int, 10 << 20, least=0),
            ),
            unsearched=kernels_are_unmeasured,
        ),
        Algorithm(
            name="copy_engine",
            label="copy engine",
            frame="copy_engine",
            transport=f"{_TRANSPORTS}copy_engine:CopyEngine",
            devices=("cuda",),
            options=(Option("least_bytes", int, 1 << 20, least=0),),
            traffic=_behind_barriers,
            uses_kernels=False,
            is_tried_last=True,
            unsearched=where_it_won,
        ),
        Algorithm(
            name="sharded",
            label="sharded",
            frame="sharded",
            transport=f"{_TRANSPORTS}sharded:Sharded",
            traffic=_half_an_all_reduce,
            shards_update=True,
            gathering=_half_an_all_reduce,
            unsearched=memory_is_what_it_saves,
        ),
        Algorithm(
            name="kvstore",
            label="key-value store",
            frame="kvstore",
            transport="ridgeline.runtime.kvstore.training.transport:StoreTransport",
            joining="ridgeline.runtime.kvstore.training.joining:join_store",
            devices=("cpu",),
            busiest=serving.busiest,
            options=serving.OPTIONS,
            objection=serving.objection,
            remark=serving.REMARK,
            unsearched=servers_share_links,
        ),
    )
}
"""Word in `Sync.algorithm` to what it means, in the order in which plans with them are compared."""

REHEARSAL = "ridgeline.runtime.sync.rehearsal:rehearsal"
"""The runtime's function that has a codec do its work without other workers, as the probe times it."""
_CODECS = "ridgeline.runtime.sync.codecs."
_BLOCK = Option("block", int, 1024, least=256, most=2048)

COMPRESSIONS: dict[str, Compression] = {
    entry.name: entry
    for entry in (
        Compression(
            name=UNCOMPRESSED, label="uncompressed", wire_bytes=payloads.unchanged, is_exact=True
        ),
        Compression(
            name="fp16",
            label="fp16",
            wire_bytes=payloads.scattered(2, in_blocks=True),
            codec=f"{_CODECS}blocks:Float16",
            codec_passes=MemoryPasses(16.0, 4.5),
            exchange="scatter",
            state_bytes=_residual,
            options=(_BLOCK,),
        ),
        Compression(
            name="bf16",
            label="bf16",
            wire_bytes=payloads.scattered(2, in_blocks=False),
            codec=f"{_CODECS}bfloat16:BFloat16",
            codec_passes=MemoryPasses(11.0, 2.5),
            exchange="scatter",
            state_bytes=_residual,
        ),
        Compression(
            name="fp8",
            label="fp8",
            wire_bytes=payloads.scattered(1, in_blocks=True),
            codec=f"{_CODECS}blocks:Float8",
            codec_passes=MemoryPasses(15.0, 4.0),
            exchange="scatter",
            state_bytes=_residual,
            options=(_BLOCK,),
        ),
        Compression(
            name="int8",
            label="int8",
            wire_bytes=payloads.scattered(1, in_blocks=True),
            codec=f"{_CODECS}blocks:Int8",
            codec_passes=MemoryPasses(17.0, 4.0),
            exchange="scatter",
            state_bytes=_residual,
            options=(_BLOCK,),
        ),
        Compression(
            name="topk",
            label="top-k",
            wire_bytes=payloads.largest,
            codec=f"{_CODECS}topk:TopK",
            codec_passes=MemoryPasses(14.0, 0.1),
            exchange="gather",
            state_bytes=_residual_and_momentum,
            options=(
                Option("density", float, 0.01, least=0.0, most=1.0),
                Option("momentum", float, 0.0, least=0.0, most=1.0),
                Option("warmup_steps", int, 0, least=0, changes_shapes=True),
            ),
            objection=_too_dense,
        ),
        Compression(
            name="powersgd",
            label="PowerSGD",
            wire_bytes=payloads.factors,
            shaped_bytes=payloads.factors_of_shapes,
            codec=f"{_CODECS}powersgd:PowerSGD",
            codec_passes=MemoryPasses(9.0, 1.0),
            state_bytes=_residual_and_factor,
            options=(Option("rank", int, 4, least=1),),
            rounds=2,
        ),
        Compression(
            name="sign",
            label="sign",
            wire_bytes=payloads.signs,
            shaped_bytes=payloads.signs_of_shapes,
            options=(Option("block", int, 64, least=32, most=2048),),
            objection=_uneven_block,
            codec=f"{_CODECS}sign:Sign",
            codec_passes=MemoryPasses(16.0, 11.0),
            exchange="gather",
            state_bytes=_residual,
        ),
    )
}
"""Word in `Sync.compression` to what it means.

Source of `codec_passes`: the reads and writes of the operators that each codec calls, for float32 gradients;
adding what was left out and keeping what is has 5 of them, and 5 more where a codec makes both results again.
A product of PowerSGD, with four columns, counts as 3.5: measured, 10 ms of 45 MB on a core that copies them
in 5 to 7. Where another operator computes more than it moves (choosing the largest elements, and on a CPU
rounding to fp8, take about twice as long), it is an underestimate.
"""


def offered(device: str) -> tuple[str, ...]:
    """The algorithms that run on `cpu` or `cuda`, in the order of the table."""
    return tuple(n for n, entry in ALGORITHMS.items() if entry.runs and device in entry.devices)


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


def tried_last(device: str, workers: int) -> tuple[str, ...]:
    """Those with which the plan is tried once more that won among the others; see `Algorithm`."""
    return tuple(name for name in unsearched(device, workers) if ALGORITHMS[name].is_tried_last)


def options_of(sync: Sync) -> tuple[Option, ...]:
    """The options that a plan's algorithm, its compression and its rhythm have."""
    words = (ALGORITHMS[sync.algorithm].options, COMPRESSIONS[sync.compression].options)
    return (*words[0], *words[1], *rhythm_options(sync))


def values_of(sync: Sync) -> dict[str, OptionValue]:
    """The value of each of those options: the plan's, or the default."""
    return {
        option.name: sync.options.get(option.name, option.default) for option in options_of(sync)
    }


def changing_options(sync: Sync) -> dict[str, OptionValue]:
    """The options of a plan by which what is sent changes its shape from step to step."""
    values = values_of(sync)
    return {
        o.name: values[o.name]
        for o in options_of(sync)
        if o.changes_shapes and values[o.name] != o.default
    }


def is_exact(sync: Sync) -> bool:
    """Whether what each worker takes a step with is the plain mean of this step's gradients."""
    values = values_of(sync)
    return (
        ALGORITHMS[sync.algorithm].is_exact
        and COMPRESSIONS[sync.compression].is_exact
        and sync.every == 1
        and all(o.is_exact or values[o.name] == o.default for o in options_of(sync))
    )
