"""Settings and hardware numbers in a few words, the same in the terminal and on the page."""

from collections.abc import Sequence

from ridgeline import units
from ridgeline.machine import Machine, Quantity, Setting
from ridgeline.synchronisation import COMPRESSIONS


def quantities_of(machine: Machine) -> list[tuple[str, str, Quantity]]:
    """(what, where, number) of everything in a profile but its size tables and operator timings."""
    found = [(f"{c.family} {c.dtype}", str(c.setting), c.rate) for c in machine.ceilings]
    found += [
        (f"{entry.phase.replace('_', ' ')} dispatch", entry.device, entry.seconds)
        for entry in machine.dispatch
    ]
    for overlap in machine.overlaps:
        where = str(overlap.setting)
        if overlap.kernel is not None:
            where += f", kernels of {units.seconds(overlap.kernel.value)}"
        found.append(("slowdown of computing while communicating", where, overlap.compute_slowdown))
        found.append(
            ("slowdown of communicating while computing", where, overlap.communication_slowdown)
        )
    for timing in machine.codecs:
        entry = COMPRESSIONS.get(timing.compression)  # of another program, it may be unknown here
        label = timing.compression if entry is None else entry.label
        where = str(timing.setting)
        found += [
            (f"encoding each further parameter as {label}", where, timing.parameter),
            (f"encoding each further shape as {label}", where, timing.shape),
            (f"slowdown of computing while encoding as {label}", where, timing.compute_slowdown),
            (f"slowdown of encoding as {label} while computing", where, timing.codec_slowdown),
        ]
    return found


def spread(quantity: Quantity) -> str:
    """The distance of the quartiles as a share of the median."""
    return units.percent((quantity.high - quantity.low) / quantity.value)


def at_work(setting: Setting) -> str:
    """What runs at a setting, to follow "while"."""
    if setting.device == "cuda":
        return f"{setting.workers} GPU{'s' if setting.workers > 1 else ''} run"
    workers = f"{setting.workers} worker{'s' if setting.workers > 1 else ''}"
    return f"{workers} of {setting.threads} thread{'s' if setting.threads > 1 else ''} run"


def settings_of(machine: Machine) -> Sequence[Setting]:
    """The settings that a profile describes, in the order in which they were measured."""
    return tuple(dict.fromkeys(ceiling.setting for ceiling in machine.ceilings))
