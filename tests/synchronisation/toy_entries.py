"""An algorithm and a compression as a user registers them, and plans and a step with them."""

from ridgeline.plan import Plan, Sync
from ridgeline.synchronisation import (
    Algorithm,
    CollectiveTraffic,
    Compression,
    MemoryPasses,
    Option,
)

MIB = 1 << 20
MS = 1_000_000
GOSSIP = Algorithm(
    name="gossip",
    label="gossip protocol",
    frame="murmur",
    transport="some.module:Gossip",
    devices=("cpu", "cuda"),
    traffic=lambda payload, workers: (CollectiveTraffic("broadcast", payload),) * 2,
    options=(Option("hops", int, 1, least=1),),
)
HALF = Compression(
    name="half",
    label="halved",
    wire_bytes=lambda elements, size, workers, options: elements * size // 2,
    codec="some.module:Half",
    devices=("cpu",),
    codec_passes=MemoryPasses(2.0, 1.0),
    state_bytes=lambda elements, size, options: elements * size,
)


def planned(**fields: object) -> Plan:
    """Two workers and buckets of 1 MiB; the fields are those of `Sync`."""
    return Plan(workers=2, threads=1, sync=Sync(bucket_bytes=(MIB,), **fields))  # type: ignore[arg-type]
