"""What the experiment `memory` found: frozen values."""

from typing import ClassVar

from ridgeline.codec import Noun, Value
from ridgeline.machine import Device, Host, Quantity
from ridgeline.machine.stairs import Stair


class Latency(Value, frozen=True, kw_only=True):
    """One number that a programmer should know.

    Attributes:
        name: What is timed.
        textbook_s: What the textbook has; None: nothing like it.
        measured: On this machine; None where it could not be.
        reason: Why it could not be.
        how: How it was measured, or where it differs from the textbook's.
    """

    name: str
    textbook_s: float | None = None
    measured: Quantity | None = None
    reason: str = ""
    how: str = ""


class MemoryExperiment(Noun, frozen=True, kw_only=True):
    """The latencies of one machine; saved as JSON."""

    kind: ClassVar[str] = "memory-experiment"

    date: str
    host: Host
    devices: tuple[Device, ...]
    is_quick: bool
    caches: dict[str, int]
    """Level to bytes, as the system describes them."""
    stairs: tuple[Stair, ...]
    latencies: tuple[Latency, ...]
    notes: tuple[str, ...] = ()
