"""Reads from storage, past the system's cache of files."""

import errno
from pathlib import Path

from ridgeline import units
from ridgeline.experiments.memory.result import Latency
from ridgeline.probe.files.blocks import seconds_of
from ridgeline.probe.files.storage import Scratch, shown

RANDOM = "read of 4 KiB from storage, at random"
IN_ORDER = "read of 1 MiB from storage, in order"
TEXTBOOK_S = {RANDOM: 120e-6, IN_ORDER: 208e-6}
"""Of an NVMe drive. Source: Dive into Deep Learning, 12.4."""


def storage_latencies(folder: Path, num_bytes: int, num_reads: int) -> list[Latency]:
    """Direct reads, one after another, of a file that is made for it.

    Returns:
        With a reason instead of figures where the file system allows no direct reads, or has no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with Scratch(folder) as scratch:
            if not scratch.is_direct:
                return _not_held(f"the file system of {folder} allows no direct I/O")
            # Written, not only reserved: blocks that never were are answered without the drive.
            scratch.write(num_bytes)
            timed = {
                RANDOM: seconds_of(scratch.read_at_random(most=num_reads)),
                IN_ORDER: seconds_of(scratch.read(most=num_reads)),
            }
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return _not_held(f"{folder} has no room for {units.num_bytes(num_bytes)}")
        raise
    how = f"direct, one after another, of {units.num_bytes(num_bytes)} in {shown(folder)}"
    return [
        Latency(name=name, textbook_s=TEXTBOOK_S[name], measured=measured, how=how)
        for name, measured in timed.items()
    ]


def _not_held(reason: str) -> list[Latency]:
    return [
        Latency(name=name, textbook_s=textbook_s, reason=reason)
        for name, textbook_s in TEXTBOOK_S.items()
    ]
