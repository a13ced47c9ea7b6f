"""What a full measurement adds to a quick one, part by part, and how long all of it still takes."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

from ridgeline.machine import Machine
from ridgeline.probe.files.storage_rates import with_storage
from ridgeline.probe.gpu_memory.gpu_levels import with_gpu_levels
from ridgeline.probe.host.microarchitecture import with_microarchitecture
from ridgeline.probe.host.staircase import with_stairs
from ridgeline.probe.rates.contention import with_contention
from ridgeline.probe.rates.operator_dispatch import with_operator_dispatch

Keep = Callable[[Machine], Machine]
Say = Callable[[str], None]


class FullPart(NamedTuple):
    """A part of a full measurement.

    `take` adds to a profile what it lacks of it, `seconds` is about how long that takes where it lacks all,
    and `is_known` says whether the profile that was asked about has some of it already.
    """

    take: Callable[[Machine, Keep, Say], Machine]
    seconds: float
    is_known: bool


def full_parts(machine: Machine) -> tuple[FullPart, ...]:
    """All parts, in the order in which they are taken, and whether `machine` has them.

    Source: seconds between their lines on two cores with one setting of several workers; the GPU's part on an
        H200.
    """
    return (
        FullPart(with_operator_dispatch, 12.0, bool(machine.operator_dispatch)),
        FullPart(with_contention, 14.0, bool(machine.contention)),
        # Without a GPU there is nothing of it to know.
        FullPart(with_gpu_levels, 30.0, machine.num_gpus == 0 or machine.gpu.stairs is not None),
        FullPart(with_stairs, 40.0, bool(machine.stairs)),
        FullPart(with_microarchitecture, 25.0, machine.microarchitecture.nodes is not None),
        FullPart(with_storage, 22.0, bool(machine.storage)),
    )


def full_seconds(machine: Machine) -> float:
    """About how long the parts take that a profile has nothing of."""
    return sum(part.seconds for part in full_parts(machine) if not part.is_known)


def completed(machine: Machine, keep: Keep, say: Say) -> Machine:
    """The profile with what only a full measurement has, each part kept as it comes.

    Args:
        machine: What is known.
        keep: See `fields.with_fields`.
        say: Takes a line before each piece of work, which ends with about how long all of it still takes.
    """
    parts = full_parts(machine)
    for number, part in enumerate(parts):
        behind_s = sum(one.seconds for one in parts[number + 1 :] if not one.is_known)
        end_s = time.monotonic() + part.seconds

        def tell(line: str, end_s: float = end_s, behind_s: float = behind_s) -> None:
            # A part that takes longer than usual is not over because of that.
            say(f"{line}; {left(behind_s + max(1.0, end_s - time.monotonic()))}")

        machine = part.take(machine, keep, tell)
    return machine


def left(seconds: float) -> str:
    """About how long something still takes, in words; to the second it is known by nobody.

    Example:
        >>> left(8.2), left(71.0), left(400.0)
        ('about 10 s left', 'about 80 s left', 'about 7 min left')
    """
    if seconds > 120.0:
        return f"about {math.ceil(seconds / 60.0)} min left"
    return f"about {10 * math.ceil(seconds / 10.0)} s left"
