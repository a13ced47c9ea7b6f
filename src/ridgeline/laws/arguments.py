"""What the laws accept: numbers in the range in which they mean something, with a plain error otherwise."""

import math
from collections.abc import Sequence
from itertools import pairwise

from ridgeline.errors import LawError

_MOST_BITS = 1023
"""Whole numbers with more may be too large to divide as floats, of which the laws are made."""
_MOST_WORKERS = 1e15
"""In fits: of more, doubles do not tell n from n - 1, which all speed-up laws are about."""
_VALUES = (1e-60, 1e60)
"""Throughputs that fits take: the squares of their ratios are no longer finite much beyond these."""


def check(
    name: str,
    value: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    is_finite: bool = True,
) -> float:
    """`value`, when it lies in the range that a law needs.

    Args:
        name: Argument name for the message.
        value: What the caller gave.
        least: Smallest allowed value.
        above: The value must be greater than this.
        most: Largest allowed value.
        is_finite: Whether infinity is refused too (NaN always is).

    Raises:
        LawError: it does not.
    """
    is_countless = isinstance(value, int) and value.bit_length() > _MOST_BITS
    is_wrong = is_countless or (
        # NaN compares as false with every bound, so it has to be asked for.
        _is_nan(name, value)
        or (is_finite and math.isinf(value))
        or (least is not None and value < least)
        or (above is not None and value <= above)
        or (most is not None and value > most)
    )
    if is_wrong:
        wanted = [
            f"{sign} {bound:g}"
            for sign, bound in ((">=", least), (">", above), ("<=", most))
            if bound is not None
        ]
        kind = "finite " if is_finite or is_countless else ""
        got = (
            f"a whole number of {int(value).bit_length()} bits"
            if is_countless
            else f"{float(value):g}"
        )
        ends = f" {' and '.join(wanted)}" if wanted else ""
        raise LawError(f"wanted a {kind}{name}{ends}, got {got}; give a number in that range")
    return value


def _is_nan(name: str, value: float) -> bool:
    try:
        return math.isnan(value + 0.0)  # as what laws count with: decimals are numbers, but do not
    # Scripts give what no type checker has read: texts, arrays, quantities of a machine.
    except (TypeError, ValueError) as error:
        raise LawError(
            f"wanted one number as {name}, got a {type(value).__name__}; give a float, such as the value of "
            "a Quantity"
        ) from error


def check_ascending(name: str, values: Sequence[float]) -> None:
    """Refuse a table that cannot be read between its points.

    Args:
        name: What the values are, for the message.
        values: In the order of the table.

    Raises:
        LawError: a value is not above the one before it.
    """
    for before, value in pairwise(map(float, values)):
        if value <= before:
            raise LawError(
                f"wanted {name} in ascending order, each once, got {value:g} after {before:g}; sort the table"
            )


def check_numbers(
    name: str,
    values: Sequence[float],
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    is_finite: bool = True,
) -> list[float]:
    """The numbers of a sequence, or of an array or tensor of one dimension, as floats.

    Args:
        name: Of one of them, for the message.
        values: What the caller gave.
        least: See `check`, as the others below.
        above: The values must be greater than this.
        most: Largest allowed value.
        is_finite: Whether infinity is refused, too.

    Raises:
        LawError: they are no sequence (sets have no order), or a value is not in range.
    """
    # Scripts give what no type checker has read.
    as_list = getattr(values, "tolist", None)
    listed: object = values if as_list is None else as_list()
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
        raise LawError(
            f"wanted a sequence of numbers as {name}, got a {type(values).__name__}; give a list"
        )
    limits = {"least": least, "above": above, "most": most}
    return [float(check(name, value, is_finite=is_finite, **limits)) for value in listed]


def check_points(
    workers: Sequence[float], values: Sequence[float], least: int
) -> tuple[list[float], list[float]]:
    """The points that a scaling law is fitted to, refused where none can be.

    Raises:
        LawError: no sequences of numbers, unequal lengths, fewer than `least` different numbers of workers,
            or numbers out of range (workers from 1 to 1e15, values from 1e-60 to 1e60).
    """
    counts = check_numbers("workers", workers, least=1.0, most=_MOST_WORKERS)
    positive = check_numbers("value", values, above=0.0)
    rates = check_numbers("value", positive, least=_VALUES[0], most=_VALUES[1])
    if len(counts) != len(rates):
        raise LawError(
            f"wanted one value per number of workers, got {len(rates)} values for {len(counts)}; "
            "give two sequences of one length"
        )
    different = len(set(counts))
    if different < least:
        raise LawError(
            f"wanted at least {least} different numbers of workers to fit, got {different}; "
            "measure more points"
        )
    return counts, rates
