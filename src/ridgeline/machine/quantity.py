"""`Quantity`: a number about hardware, with its unit, its spread and its source."""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from msgspec import Meta, structs

from ridgeline import units
from ridgeline.codec import Value

LEAST, MOST = 1e-30, 1e30
"""No quantity but 0 is smaller or larger, in whatever unit; sums, squares and ratios of such stay finite."""

# Checked where a file is read and not where a value is made: thousands are made for one simulation.
Amount = Annotated[float, Meta(ge=0.0, le=MOST)]
Source = Literal["measured", "datasheet", "assumed"]


class Quantity(Value, frozen=True, kw_only=True):
    """A number about hardware: median `value` in `unit`, quartiles `low` and `high`, `n` samples."""

    value: Amount
    unit: str
    low: float
    high: float
    n: int
    source: Source

    @classmethod
    def measured(cls, samples: Sequence[float], unit: str) -> Self:
        """Median and quartiles of measured samples; needs at least one."""
        ordered = sorted(samples)
        if len(ordered) < 2:
            low = high = ordered[0]
        else:
            low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        middle = statistics.median(ordered)
        return cls(value=middle, unit=unit, low=low, high=high, n=len(ordered), source="measured")

    @classmethod
    def assumed(cls, value: float, unit: str) -> Self:
        """A number that was not measured; shown as such wherever it is printed."""
        return cls(value=value, unit=unit, low=value, high=value, n=0, source="assumed")

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median; 0 of a median that is 0."""
        return (self.high - self.low) / self.value if self.value else 0.0

    def times(self, factor: float) -> Self:
        """The number and its quartiles multiplied."""
        fields = {name: factor * getattr(self, name) for name in ("value", "low", "high")}
        return structs.replace(self, **fields)

    def __str__(self) -> str:
        text = units.quantity(self.value, self.unit)
        if self.source != "measured":
            return f"{text} ({self.source})"
        return f"{text} (spread {units.percent(self.spread)}, n={self.n})"


class Sampled(Quantity, frozen=True, kw_only=True):
    """A measured number that keeps its samples, in the order in which they were taken."""

    samples: tuple[float, ...]

    @classmethod
    def measured(cls, samples: Sequence[float], unit: str) -> Self:
        """Median and quartiles of the samples, and those; needs at least one."""
        known = Quantity.measured(samples, unit)
        fields = {name: getattr(known, name) for name in Quantity.__struct_fields__}
        return cls(**fields, samples=tuple(samples))

    def times(self, factor: float) -> Self:
        """The number, its quartiles and its samples multiplied."""
        samples = tuple(factor * sample for sample in self.samples)
        return structs.replace(super().times(factor), samples=samples)
