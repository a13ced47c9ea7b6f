"""What synchronising costs: collectives and bytes of a bucket, memory traffic of its codec, and state."""

from collections.abc import Sequence

import msgspec

from ridgeline import units
from ridgeline.laws.collectives import bus_bandwidth_factor
from ridgeline.machine import Operation
from ridgeline.synchronisation.entries import CollectiveTraffic, Shape, one_all_reduce
from ridgeline.synchronisation.payloads import update_shard_elements
from ridgeline.synchronisation.rhythm import outer_state_bytes, trains_apart
from ridgeline.synchronisation.serving import goes_ahead, updates
from ridgeline.synchronisation.sync import Sync
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    UNCOMPRESSED,
    is_exact,
    offered,
    offered_compressions,
    values_of,
)

BUFFERS: Operation = "broadcast"
"""How the buffers of worker 0 reach the others."""
FLAG_BYTES = 4
"""Of each parameter, by which workers say whether they have a gradient of it."""
_SAMPLE_BYTES, _SAMPLE_WORKERS = 1 << 20, 4
"""A payload and workers of which an entry is asked which collectives it needs."""


def wire_bytes(
    sync: Sync, num_elements: int, element_bytes: int, workers: int, shapes: Sequence[Shape] = ()
) -> int:
    """Bytes of what a worker sends of one bucket, encoded; a worker alone sends nothing.

    Args:
        sync: Names the compression and its options.
        num_elements: Of the bucket, on each worker.
        element_bytes: Of one element as gradients hold it.
        workers: Data-parallel workers.
        shapes: Of the parameters in it, where they are known.
    """
    if workers == 1:
        return 0
    compression, options = COMPRESSIONS[sync.compression], values_of(sync)
    # A search that is still cutting buckets knows no shapes: one parameter then stands for all.
    if compression.shaped_bytes is not None and shapes:
        return compression.shaped_bytes(shapes, num_elements, options)
    return compression.wire_bytes(num_elements, element_bytes, workers, options)


def handed_bytes(
    sync: Sync, num_elements: int, element_bytes: int, workers: int, shapes: Sequence[Shape] = ()
) -> int:
    """Bytes that a worker hands to collectives for one bucket: exactly what a run counts.

    Arguments as in `wire_bytes`, with what aligns the gradients among the elements (see
    `plan.aligned_elements`) and the shapes of all parameters.
    """
    if shards_update(sync) and workers > 1:  # its part of the parameters, behind the optimizer
        return (
            (workers + 1)
            * update_shard_elements(num_elements, element_bytes, workers)
            * element_bytes
        )
    encoded = wire_bytes(sync, num_elements, element_bytes, workers, shapes)
    # Where payloads are scattered, the mean of a worker's share is encoded and handed over as well.
    is_scattered = COMPRESSIONS[sync.compression].exchange_among(workers) == "scatter"
    return encoded + (encoded // workers if is_scattered else 0)


def link_bytes(
    sync: Sync, num_elements: int, element_bytes: int, workers: int, shapes: Sequence[Shape] = ()
) -> float:
    """Bytes that cross each worker's link for one bucket, in one direction; arguments as in `traffic_of`."""
    # What is gathered behind the optimizer crosses the same link, only later.
    parts = (
        *traffic_of(sync, num_elements, element_bytes, workers, shapes),
        *gathering_of(sync, num_elements * element_bytes, workers),
    )
    return sum(bus_bandwidth_factor(p.operation, workers) * p.num_bytes for p in parts)


def why_losing(
    sync: Sync, num_elements: int, element_bytes: int, workers: int, shapes: Sequence[Shape] = ()
) -> str:
    """Why a compression cannot pay: it moves no fewer bytes than none; empty where it does, or is none.

    Arguments as in `wire_bytes`, of all gradients.
    """
    if not COMPRESSIONS[sync.compression].encodes or workers == 1 or not num_elements:
        return ""
    # Options of the compression that is taken away mean nothing to the plain exchange, and would be refused.
    plain = msgspec.structs.replace(sync, compression=UNCOMPRESSED, options={})
    mine = link_bytes(sync, num_elements, element_bytes, workers, shapes)
    others = link_bytes(plain, num_elements, element_bytes, workers, shapes)
    if mine < others:
        return ""
    label = COMPRESSIONS[sync.compression].label
    return (
        f"moves {units.num_bytes(round(mine))} through each worker's link as {label} gradients, and no more "
        f"than {units.num_bytes(round(others))} uncompressed"
    )


def traffic_of(
    sync: Sync, num_elements: int, element_bytes: int, workers: int, shapes: Sequence[Shape] = ()
) -> tuple[CollectiveTraffic, ...]:
    """The collectives that one bucket costs: the algorithm's, of what the compression leaves.

    Encoded payloads that cannot be added up go their own ways, see `Compression.exchange`.

    Arguments as in `wire_bytes`; a worker alone costs nothing.
    """
    if workers == 1:
        return ()
    payload_bytes = wire_bytes(sync, num_elements, element_bytes, workers, shapes)
    # A collective ends when its busiest link is done, so that link's bytes are priced.
    payload_bytes = round(
        payload_bytes * ALGORITHMS[sync.algorithm].busiest(workers, values_of(sync))
    )
    compression = COMPRESSIONS[sync.compression]
    exchange = compression.exchange_among(workers)
    if exchange in {"gather", "swap"}:
        # Size tables count the whole tensor that is gathered, not what one worker gives.
        return (CollectiveTraffic("all_gather", payload_bytes * workers),)
    if exchange == "scatter":
        # Both payloads are whole: every worker sends a share to each, and then gathers all encoded means.
        return (
            CollectiveTraffic("all_to_all", payload_bytes),
            CollectiveTraffic("all_gather", payload_bytes),
        )
    # Divided, not repeated: each round carries a part of the payload and pays a latency of its own.
    rounds = compression.rounds
    return ALGORITHMS[sync.algorithm].traffic(-(-payload_bytes // rounds), workers) * rounds


def flags_of(sync: Sync, num_parameters: int) -> tuple[CollectiveTraffic, ...]:
    """The collective of a step, with its last bucket, that says which gradients workers have.

    None where flags travel behind the payloads, which no codec may touch.
    """
    if not COMPRESSIONS[sync.compression].encodes or trains_apart(sync) or not num_parameters:
        return ()
    # How many workers there are does not change the payload of an all-reduce.
    return one_all_reduce(FLAG_BYTES * num_parameters, 1)


def gathering_of(sync: Sync, num_bytes: int, workers: int) -> tuple[CollectiveTraffic, ...]:
    """The collectives that bring the updated parameters of one bucket to all, behind the optimizer.

    None where every worker updates all of them.
    """
    return ALGORITHMS[sync.algorithm].gathering(num_bytes, workers) if workers > 1 else ()


def gathering_bytes(sync: Sync, num_bytes: int, workers: int) -> int:
    """Memory traffic of bringing updated parameters of so many bytes to all, the collectives apart.

    Source: counted. Its own part is copied into the bucket, and the bucket into the parameters.
    """
    if not shards_update(sync) or workers == 1:
        return 0
    return 2 * num_bytes + 2 * -(-num_bytes // workers)


def shards_update(sync: Sync) -> bool:
    """Whether each worker updates a part of the parameters alone; see `Algorithm.shards_update`."""
    return ALGORITHMS[sync.algorithm].shards_update


def uses_kernels(sync: Sync) -> bool:
    """Whether kernels on the device move the bytes of buckets; see `Algorithm.uses_kernels`."""
    return ALGORITHMS[sync.algorithm].uses_kernels or COMPRESSIONS[sync.compression].encodes


def num_shards(sync: Sync, workers: int) -> int:
    """Into how many parts, one a worker, the update and the optimizer's state are divided; 1 for none."""
    return workers if shards_update(sync) else 1


def state_parts(sync: Sync, workers: int) -> int:
    """Of how many parts of the optimizer's state each worker holds one; 1 where each holds all of it."""
    # Of stores only the synchronous one has a server beside each worker; others may have fewer.
    is_parted = shards_update(sync) or (replaces_update(sync) and is_exact(sync))
    return workers if is_parted else 1


def serving_bytes(sync: Sync, num_bytes: int, workers: int) -> int:
    """Memory traffic of pushing so many bytes to a store and pulling them, the links and the update apart.

    Source: counted. What goes to each worker is put together (2), sums are taken of the parts (2, and 3 for
    each worker more) and sent (2), what others send is taken (2 of each), and all is copied (2).
    """
    if not replaces_update(sync) or workers == 1:
        return 0
    return round(num_bytes * (4 + (4 + 5 * (workers - 1)) / workers))


def serving_updates(sync: Sync, workers: int) -> float:
    """How often a server makes the whole update in a step of all workers; see `serving.updates`."""
    return updates(workers, values_of(sync))


def sends_buffers(sync: Sync) -> bool:
    """Whether all workers have the buffers of the first one: not where they need not wait for each other."""
    return not replaces_update(sync) or is_exact(sync)


def replaces_update(sync: Sync) -> bool:
    """Whether something else than the worker's own optimizer updates; see `Algorithm.joining`."""
    return ALGORITHMS[sync.algorithm].replaces_update


def steps_between_meetings(sync: Sync) -> int:
    """After how many steps each worker waits for all others; 0 where it never does."""
    if goes_ahead(values_of(sync)):
        return 0
    return sync.every if trains_apart(sync) else 1


def codec_bytes(sync: Sync, num_bytes: int, workers: int) -> tuple[int, int]:
    """Bytes of memory traffic (to encode, to decode) of a bucket of `num_bytes`; zero without a codec.

    Payloads that are gathered are decoded one by one, each into the whole bucket; shares of payloads are
    decoded, and their mean is encoded and decoded again.
    """
    if workers == 1:
        return 0, 0
    compression = COMPRESSIONS[sync.compression]
    passes = compression.codec_passes
    exchange = compression.exchange_among(workers)
    encodings = 1.0 + 1.0 / workers if exchange == "scatter" else 1.0
    # A scattered bucket is decoded as it was sent (for what was left out), by its shares, and as a mean.
    decodings = {"sum": 1.0, "scatter": 3.0}.get(exchange, float(workers))
    return round(passes.encode * num_bytes * encodings), round(
        passes.decode * num_bytes * decodings
    )


def state_bytes(sync: Sync, num_elements: int, element_bytes: int) -> int:
    """Bytes that a worker keeps from step to step for its way to exchange, its compression and its rhythm."""
    compression = COMPRESSIONS[sync.compression]
    kept = compression.state_bytes(num_elements, element_bytes, values_of(sync))
    held = num_elements * element_bytes if replaces_update(sync) else 0  # a copy of the parameters
    return kept + held + outer_state_bytes(sync, num_elements, element_bytes)


def bucket_operations(device: str) -> tuple[Operation, ...]:
    """The collectives of buckets on a device: those of what is offered there, in the order of the tables."""
    found: dict[Operation, None] = {}
    for name in offered(device):
        entry = ALGORITHMS[name]
        sizes = (_SAMPLE_BYTES, _SAMPLE_WORKERS)
        traffic = (*entry.traffic(*sizes), *entry.gathering(*sizes))
        found.update(dict.fromkeys(part.operation for part in traffic))
    kinds = {COMPRESSIONS[name].exchange for name in offered_compressions(device)}
    # Codecs that scatter or gather go past the algorithm, so it does not name their collectives.
    if "scatter" in kinds:
        found["all_to_all"] = None
    if kinds & {"scatter", "gather"}:
        found["all_gather"] = None
    return tuple(found)


def operations(device: str) -> tuple[Operation, ...]:
    """The collectives that a step may need on a device: those of buckets, and the broadcast of buffers.

    They are what is measured of a machine.
    """
    # In order, as all ranks measure these one after the other and must begin with the same.
    return tuple(dict.fromkeys((*bucket_operations(device), BUFFERS)))
