"""What a host does to memory access and arithmetic: the profile with what it lacks, kept part by part."""

from collections.abc import Callable

from ridgeline import units
from ridgeline.machine import Machine
from ridgeline.probe.fields import FieldProbe, with_fields
from ridgeline.probe.host.caches import caches
from ridgeline.probe.host.false_sharing import measure_false_sharing
from ridgeline.probe.host.nodes import measure_nodes
from ridgeline.probe.host.pages import measure_pages
from ridgeline.probe.host.staircase import room_bytes, sizes
from ridgeline.probe.host.strides import measure_strides
from ridgeline.probe.host.vectors import measure_vectors


def with_microarchitecture(
    machine: Machine, keep: Callable[[Machine], Machine], say: Callable[[str], None]
) -> Machine:
    """The profile with what it lacks of `Machine.microarchitecture`, kept after each part.

    Arguments as of `fields.with_fields`.

    Cost: one core for about 20 s, and two for 3 s, and memory of eight times the largest cache, at most a
        quarter of what is free. Without a C compiler nothing is measured, and a warning says so.
    """
    return with_fields(machine, "microarchitecture", parts(), keep, say, "processor")


def parts() -> tuple[FieldProbe, ...]:
    """The parts in the order in which they are measured: first what needs least memory."""
    half, whole = (walked_bytes(share) for share in (0.5, 1.0))
    walk = f"over {units.num_bytes(whole)}"
    return (
        FieldProbe("vectors", "multiply-adds by width of vectors", measure_vectors),
        FieldProbe(
            "false_sharing", "two cores that write to one cache line", measure_false_sharing
        ),
        FieldProbe("strides", f"loads by stride {walk}", lambda: measure_strides(whole)),
        FieldProbe(
            "pages",
            f"small and large pages over {units.num_bytes(half)}",
            lambda: measure_pages(half),
        ),
        FieldProbe("nodes", "nodes of memory", lambda: measure_nodes(half)),
    )


def walked_bytes(share: float) -> int:
    """The largest size that the staircase has, or less where only a share of the room may be taken."""
    return sizes(caches(), int(share * room_bytes()), quick=False)[-1]
