"""Settings, hardware numbers and sentences, the same in the terminal and on the page."""

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline import units
from ridgeline.machine import Ceiling, Device, Machine, Quantity, Setting
from ridgeline.machine.datasheet import sheet_of, stated
from ridgeline.reporting.grid import Grid
from ridgeline.synchronisation import COMPRESSIONS


class Figure(NamedTuple):
    """One number of a profile: of what, at which setting, and what the vendor's datasheet has for it."""

    what: str
    where: str
    number: Quantity
    stated: Quantity | None = None

    @property
    def beside(self) -> str:
        """The datasheet's value, and how much of it was measured; empty where none is known."""
        if self.stated is None:
            return ""
        share = units.percent(self.number.value / self.stated.value)
        return f"{units.quantity(self.stated.value, self.stated.unit)} ({share})"


def quantities_of(machine: Machine) -> list[Figure]:
    """Everything in a profile but its tables by size and way of access, and its operator timings."""
    found = [
        Figure(f"{c.family} {c.dtype}", str(c.setting), c.rate, stated_of(machine, c))
        for c in machine.ceilings
    ]
    found += [
        Figure(f"{entry.phase.replace('_', ' ')} dispatch", entry.device, entry.seconds)
        for entry in machine.dispatch
    ]
    for overlap in machine.overlaps:
        where = str(overlap.setting)
        if overlap.kernel is not None:
            where += f", kernels of {units.seconds(overlap.kernel.value)}"
        found += [
            Figure("slowdown of computing while communicating", where, overlap.compute_slowdown),
            Figure(
                "slowdown of communicating while computing", where, overlap.communication_slowdown
            ),
        ]
        if overlap.gain is not None:
            found.append(Figure("gain by doing both at once", where, overlap.gain))
    for timing in machine.codecs:
        entry = COMPRESSIONS.get(timing.compression)  # of another program, it may be unknown here
        label = timing.compression if entry is None else entry.label
        where = str(timing.setting)
        found += [
            Figure(what.format(label), where, number)
            for what, number in (
                ("encoding each further parameter as {}", timing.parameter),
                ("encoding each further shape as {}", timing.shape),
                ("slowdown of computing while encoding as {}", timing.compute_slowdown),
                ("slowdown of encoding as {} while computing", timing.codec_slowdown),
            )
        ]
    return found


def numbers_grid(machine: Machine) -> Grid:
    """Median, spread, repeats, samples and source of every number, and what a datasheet has for it."""
    figures = quantities_of(machine)
    # A column that no row fills is left out.
    known = ("Datasheet",) if any(figure.stated for figure in figures) else ()
    head = ("What", "Where", "Median", *known, "Spread", "Repeats within", "Samples", "Source")
    rows = tuple(
        (
            figure.what,
            figure.where,
            units.quantity(number.value, number.unit),
            *((figure.beside,) if known else ()),
            spread(number) if number.n > 1 else "",
            repeats(number),
            str(number.n) if number.n else "",
            number.source,
        )
        for figure in figures
        for number in (figure.number,)
    )
    reading = f"Datasheet: {datasheet_of(machine)}." if known else ""
    return Grid("Numbers", head, rows, reading, right=range(2, len(head) - 1))


def gpus_of(devices: Sequence[Device]) -> list[str]:
    """The GPUs among devices, equal ones together: `2 x NVIDIA H200`."""
    names = [device.name for device in devices if device.kind == "cuda"]
    return [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]


def as_sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    start = f"{text[:1].upper()}{text[1:]}"
    return start if not start or start[-1] in ".!?" else f"{start}."


def times(factor: float) -> str:
    """A factor, such as `1.30 x`."""
    return f"{units.digits3(factor)} x"


def spread(quantity: Quantity) -> str:
    """The distance of the quartiles as a share of the median."""
    return units.percent(quantity.spread)


def repeats(quantity: Quantity) -> str:
    """How far a repeated measurement may be off in nine of ten cases; empty where nobody knows."""
    within = quantity.repeats_within
    return "" if within is None else units.percent(within)


def stated_of(machine: Machine, ceiling: Ceiling) -> Quantity | None:
    """What the GPU's datasheet has where a ceiling was measured; None on CPUs, and of GPUs not known."""
    if ceiling.setting.device != "cuda":
        return None
    return stated(_gpu(machine), ceiling.family, ceiling.dtype)


def datasheet_of(machine: Machine) -> str:
    """Where the datasheet's values are from; empty without any."""
    sheet = sheet_of(_gpu(machine))
    return "" if sheet is None else sheet.source


def _gpu(machine: Machine) -> str:
    """Name of the GPU on which one worker is measured: the first."""
    # Where several are of different kinds, ceilings are of that one.
    names = (device.name for device in machine.devices if device.kind == "cuda")
    return next(names, "")


def at_work(setting: Setting) -> str:
    """What runs at a setting, to follow "while"."""
    if setting.device == "cuda":
        return f"{units.counted(setting.workers, 'GPU')} run"
    workers = units.counted(setting.workers, "worker")
    return f"{workers} of {units.counted(setting.threads, 'thread')} run"


def settings_of(machine: Machine) -> Sequence[Setting]:
    """The settings that a profile describes, in the order in which they were measured."""
    return tuple(dict.fromkeys(ceiling.setting for ceiling in machine.ceilings))
