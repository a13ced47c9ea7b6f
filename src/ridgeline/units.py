"""One formatter for every number that Ridgeline shows to people.

Three significant digits. Memory sizes are binary (KiB, MiB, GiB); rates and times are decimal
(GB/s, TFLOP/s, ms), as vendors and papers print them. Inside the program numbers stay in base units
(seconds, bytes, FLOP); only these functions turn them into text.
"""

import math
from collections.abc import Sequence

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


BITS_PER_S = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
"""Words for the rates of links, as `tc` has them."""


def digits3(value: float) -> str:
    """`value` with three significant digits and no exponent, e.g. `0.123`, `12.3`, `1230`."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    # Rounding may carry into the next decade (9.996 becomes 10.0): count the digits again.
    decimals = 2 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(decimals, 0)}f}"


def seconds(value_s: float) -> str:
    """A duration given in seconds, e.g. `12.3 ms`."""
    return _scaled(value_s, _TIME) or ("0 s" if value_s == 0 else f"{digits3(value_s / 1e-9)} ns")


def nanoseconds(value_ns: float) -> str:
    """A duration given in nanoseconds, e.g. `12.3 ms`."""
    return seconds(value_ns * 1e-9)


def moment(text: str) -> str:
    """A moment in UTC as ISO 8601 has it, e.g. `2026-01-31 12:00:00 UTC`."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def num_bytes(value_bytes: float) -> str:
    """A memory size given in bytes, e.g. `25.0 MiB`."""
    return _scaled(value_bytes, _BINARY) or f"{value_bytes:.0f} B"


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix and its unit, e.g. `quantity(4.25e12, "B/s")` is `4.25 TB/s`.

    Seconds and plain byte counts go through `seconds` and `num_bytes`.
    """
    if unit == "s":
        return seconds(value)
    if unit == "B":
        return num_bytes(value)
    scaled = _scaled(value, _DECIMAL)
    return f"{scaled}{unit}" if scaled else f"{digits3(value)} {unit}"


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    """The number in the largest of these units that it reaches; empty where it reaches none."""
    # 0.9995 and not 1, or 999.6 us would be written as 1000 us.
    found = ((scale, unit) for scale, unit in units if abs(value) >= scale * 0.9995)
    return next((f"{digits3(value / scale)} {unit}" for scale, unit in found), "")


def percent(fraction: float) -> str:
    """A fraction as a percentage with one decimal, e.g. `12.3 %`."""
    return f"{100 * fraction:.1f} %"


def counted(count: int, one: str, many: str = "") -> str:
    """How many there are, e.g. `1 worker`, `2 workers`; `many` is the plural that is not `one` with an s."""
    return f"{count} {one if count == 1 else many or f'{one}s'}"
