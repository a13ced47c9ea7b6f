"""Numbers as the cells of a table, with their spread."""

from ridgeline import units
from ridgeline.machine.quantity import Quantity
from ridgeline.reporting.labels import spread, times


def seconds(quantity: Quantity | None) -> tuple[str, str]:
    """Median and spread of a time; empty where it was not measured."""
    return ("", "") if quantity is None else (units.seconds(quantity.value), spread(quantity))


def rate(quantity: Quantity | None) -> tuple[str, str]:
    """Median and spread of a rate; empty where it was not measured."""
    if quantity is None:
        return "", ""
    return units.quantity(quantity.value, quantity.unit), spread(quantity)


def with_spread(factor: Quantity) -> str:
    """A factor and its quartiles."""
    low, high = units.digits3(factor.low), units.digits3(factor.high)
    return f"{times(factor.value)} ({low} to {high})"
