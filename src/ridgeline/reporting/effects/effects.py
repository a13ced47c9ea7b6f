"""`Effect`: what a machine does to a training step, as a table and a sentence for terminal and page."""

from typing import NamedTuple

from ridgeline import units
from ridgeline.machine.quantity import Quantity
from ridgeline.reporting.labels import spread, times


class Effect(NamedTuple):
    """One effect: the columns, the rows in them, and what it means for a training step.

    The first column says what a row is about, the others are numbers.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    reading: str


def seconds(quantity: Quantity | None) -> tuple[str, str]:
    """Median and spread of a time; empty where it was not measured."""
    return ("", "") if quantity is None else (units.seconds(quantity.value), spread(quantity))


def rate(quantity: Quantity | None) -> tuple[str, str]:
    """Median and spread of a rate; empty where it was not measured."""
    if quantity is None:
        return "", ""
    return units.quantity(quantity.value, quantity.unit), spread(quantity)


def samples(quantity: Quantity) -> str:
    """How many there are."""
    return str(quantity.n)


def with_spread(factor: Quantity) -> str:
    """A factor and its quartiles."""
    low, high = units.digits3(factor.low), units.digits3(factor.high)
    return f"{times(factor.value)} ({low} to {high})"
