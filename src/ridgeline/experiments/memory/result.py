"""What the experiment `memory` found: frozen values."""

from typing import ClassVar

from ridgeline.codec import Noun, Value
from ridgeline.machine import Device, Host, Quantity


class Stair(Value, frozen=True, kw_only=True):
    """What memory costs where so many bytes are walked through again and again.

    `access_s` is a load that waits for the one before it, somewhere in them; `word_s` 8 bytes where all are
    read in order; `line_s` 8 bytes where one word of every line is read, none waiting for another.
    """

    num_bytes: int
    access_s: Quantity
    word_s: Quantity
    line_s: Quantity
    large_page_bytes: int | None = None
    """Of this process, while it walked; None where the system does not tell."""


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
