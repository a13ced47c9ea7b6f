"""`Quantity`: a number about hardware, with its unit, its spread and its source."""

import statistics
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from msgspec import Meta, structs

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.errors import LawError
from ridgeline.laws.repeats import repeat_range

LEAST, MOST = 1e-30, 1e30
"""No quantity but 0 is smaller or larger, in whatever unit; sums, squares and ratios of such stay finite."""

# Checked where a file is read and not where a value is made: thousands are made for one simulation.
Amount = Annotated[float, Meta(ge=0.0, le=MOST)]
Bound = Annotated[float, Meta(ge=-MOST, le=MOST)]
Source = Literal["measured", "datasheet", "assumed"]


class Quantity(Value, frozen=True, kw_only=True):
    """A number about hardware: median `value` in `unit`, quartiles `low` and `high`, `n` samples.

    In nine of ten cases the median of a repeated measurement lies from `repeat_low` to `repeat_high`
    (`laws.repeats`); None where it was measured at one moment only, which tells nothing of other ones.
    """

    value: Amount
    unit: str
    low: Bound
    high: Bound
    n: Annotated[int, Meta(ge=0)]
    source: Source
    repeat_low: Bound | None = None
    repeat_high: Bound | None = None

    @classmethod
    def measured(cls, samples: Sequence[float], unit: str) -> Self:
        """Median and quartiles of measured samples; needs at least one."""
        ordered = sorted(samples)
        if len(ordered) < 2:
            # `statistics.quantiles` refuses a single sample.
            low = high = ordered[0]
        else:
            # Inclusive, so that quartiles of few samples stay within them.
            low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        middle = statistics.median(ordered)
        return cls(value=middle, unit=unit, low=low, high=high, n=len(ordered), source="measured")

    @classmethod
    def visited(cls, visits: Sequence[Sequence[float]], unit: str, common: float | None) -> Self:
        """Median and quartiles of the samples of all visits, and where a repeated measurement lies.

        Args:
            visits: Samples of each, in the order in which they were taken; each has one at least.
            unit: Of the samples.
            common: The drift of a usual number of the same run (`laws.repeats.common_drift`); None where
                nothing was visited twice, and no range is known.
        """
        found = cls.measured([sample for visit in visits for sample in visit], unit)
        if common is None:
            return found
        medians = [statistics.median(visit) for visit in visits]
        low, high = repeat_range(found.value, medians, common)
        return structs.replace(found, repeat_low=low, repeat_high=high)

    @classmethod
    def assumed(cls, value: float, unit: str) -> Self:
        """A number that was not measured; shown as such wherever it is printed."""
        return cls(value=value, unit=unit, low=value, high=value, n=0, source="assumed")

    @property
    def spread(self) -> float:
        """The distance of the quartiles as a share of the median; 0 of a median that is 0."""
        return (self.high - self.low) / self.value if self.value else 0.0

    @property
    def repeats_within(self) -> float | None:
        """How far a repeated measurement may be off, as a share of the median; None where nobody knows."""
        if self.repeat_high is None or not self.value:
            return None
        # The range is symmetric but for its cut at 0, so the upper end says how far it reaches.
        return self.repeat_high / self.value - 1.0

    def times(self, factor: float) -> Self:
        """The number, its quartiles and the range of repeated measurements multiplied."""
        names = ("value", "low", "high", "repeat_low", "repeat_high")
        known = {name: getattr(self, name) for name in names}
        # A range that nobody knows stays None.
        fields = {name: factor * number for name, number in known.items() if number is not None}
        return structs.replace(self, **fields)

    def __str__(self) -> str:
        text = units.quantity(self.value, self.unit)
        # What nobody sampled has no spread to show.
        if self.source != "measured":
            return f"{text} ({self.source})"
        within = self.repeats_within
        repeats = "" if within is None else f"repeats within {units.percent(within)}, "
        return f"{text} (spread {units.percent(self.spread)}, {repeats}n={self.n})"


def check_unit(name: str, quantity: Quantity, *wanted: str) -> None:
    """Refuse a number in another unit than those that predictions take it to have.

    Raises:
        LawError: its unit is none of the wanted.
    """
    if quantity.unit not in wanted:
        raise LawError(
            f"wanted {name} in {' or '.join(wanted)}, got {quantity.value:g} in {quantity.unit!r}; give the "
            "number in that unit"
        )


class Sampled(Quantity, frozen=True, kw_only=True):
    """A measured number that keeps its samples, in the order in which they were taken."""

    samples: tuple[float, ...]

    @classmethod
    def measured(cls, samples: Sequence[float], unit: str) -> Self:
        """Median and quartiles of the samples, and those; needs at least one."""
        # Not by `super()`, which would build a `Sampled` without its samples.
        known = Quantity.measured(samples, unit)
        return cls(**structs.asdict(known), samples=tuple(samples))

    def times(self, factor: float) -> Self:
        """The number, its quartiles and its samples multiplied."""
        samples = tuple(factor * sample for sample in self.samples)
        return structs.replace(super().times(factor), samples=samples)
