"""A host that nobody measured, for results that are shown."""

from ridgeline.machine import Host

HOST = Host(
    name="host",
    processor="Processor",
    cores=2,
    memory_bytes=1 << 30,
    cache_bytes=1 << 20,
    system="Linux",
    python="3.11",
    torch="2.13.0",
)
