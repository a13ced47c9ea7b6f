"""What synchronising costs: collectives and bytes of a bucket, memory traffic of its codec, and state."""

from typing import TYPE_CHECKING

from ridgeline.machine import Operation
from ridgeline.synchronisation.entries import Traffic
from ridgeline.synchronisation.tables import (
    ALGORITHMS,
    COMPRESSIONS,
    offered,
    offered_compressions,
    values_of,
)

if TYPE_CHECKING:
    from ridgeline.plan import Sync

BUFFERS: Operation = "broadcast"
"""How the buffers of worker 0 reach the others."""
_SAMPLE_BYTES, _SAMPLE_WORKERS = 1 << 20, 4
"""A payload and workers of which an entry is asked which collectives it needs."""


def wire_bytes(sync: "Sync", num_elements: int, element_bytes: int, workers: int) -> int:
    """Bytes that a worker hands to the algorithm for one bucket, encoded.

    What a run counts of a bucket can be compared with it. A worker alone sends nothing.

    Args:
        sync: Names the compression and its options.
        num_elements: Of the bucket, on each worker.
        element_bytes: Of one element as gradients hold it.
        workers: Data-parallel workers.
    """
    if workers == 1:
        return 0
    compression = COMPRESSIONS[sync.compression]
    return compression.wire_bytes(num_elements, element_bytes, workers, values_of(sync))


def traffic_of(
    sync: "Sync", num_elements: int, element_bytes: int, workers: int
) -> tuple[Traffic, ...]:
    """The collectives that one bucket costs: the algorithm's, of what the compression leaves.

    Encoded payloads that cannot be added up are gathered, whatever the algorithm.

    Args:
        sync: Names both.
        num_elements: Of the bucket, on each worker.
        element_bytes: Of one element as gradients hold it.
        workers: Data-parallel workers; one alone costs nothing.
    """
    if workers == 1:
        return ()
    payload_bytes = wire_bytes(sync, num_elements, element_bytes, workers)
    if not COMPRESSIONS[sync.compression].is_summable:
        return (Traffic("all_gather", payload_bytes * workers),)
    return ALGORITHMS[sync.algorithm].traffic(payload_bytes, workers)


def codec_bytes(sync: "Sync", num_bytes: int, workers: int) -> tuple[int, int]:
    """Bytes of memory traffic (to encode, to decode) of a bucket of `num_bytes`; zero without a codec.

    Payloads that cannot be added up are decoded one by one, each into the whole bucket.
    """
    if workers == 1:
        return 0, 0
    compression = COMPRESSIONS[sync.compression]
    passes = compression.codec_passes
    payloads = 1 if compression.is_summable else workers
    return round(passes.encode * num_bytes), round(passes.decode * num_bytes * payloads)


def state_bytes(sync: "Sync", num_elements: int, element_bytes: int) -> int:
    """Bytes that a worker's compression keeps from step to step, for gradients of so many elements."""
    compression = COMPRESSIONS[sync.compression]
    return compression.state_bytes(num_elements, element_bytes, values_of(sync))


def bucket_operations(device: str) -> tuple[Operation, ...]:
    """The collectives of buckets on a device: those of what is offered there, in the order of the tables."""
    found: dict[Operation, None] = {}
    for name in offered(device):
        traffic = ALGORITHMS[name].traffic(_SAMPLE_BYTES, _SAMPLE_WORKERS)
        found.update(dict.fromkeys(part.operation for part in traffic))
    if any(not COMPRESSIONS[name].is_summable for name in offered_compressions(device)):
        found["all_gather"] = None
    return tuple(found)


def operations(device: str) -> tuple[Operation, ...]:
    """The collectives that a step may need on a device: those of buckets, and the broadcast of buffers.

    They are what is measured of a machine.
    """
    return tuple(dict.fromkeys((*bucket_operations(device), BUFFERS)))
