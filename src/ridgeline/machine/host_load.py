"""`HostLoad`: what others took of the processors while a machine was measured."""

from typing import Self

from msgspec import structs

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.machine.quantity import Amount

MOST_BY_OTHERS = 0.25
"""Share of the processors' time from which other programs disturb what is measured."""
MOST_STOLEN = 0.1
"""Of a virtual machine's processors, by its host: rates fall by as much, and verdicts allow 15 %."""
MOST_THROTTLED = 0.1
"""Share of the periods of a control group in which it stood still because its quota was used up."""
MOST_SPREAD = 0.5
"""Distance of the quartiles as a share of the median, of half of all ceilings: load that came and went.

Source: quick profiles of two cores: 0.03 where they are idle, and no more beside two busy processes, which
halve all rates alike. So it says little, but also where the use by others is not counted.
"""


class HostLoad(Value, frozen=True, kw_only=True):
    """Shares, from 0 to 1, of what a measurement lacked; None where the system does not say.

    `others` is the part of the time of the processors which this process may use that went to other programs,
    `stolen` what the host of a virtual machine gave to others, `throttled` the share of the periods of the
    control group in which it was throttled. `spread` is the median of the spreads of repeated samples.
    """

    others: Amount | None = None
    stolen: Amount | None = None
    throttled: Amount | None = None
    spread: Amount | None = None

    @property
    def causes(self) -> tuple[str, ...]:
        """What disturbed the measurement, in words; empty where nothing did."""
        # By what is most certain first: a spread may have causes that nobody counts.
        told = (
            (self.others, MOST_BY_OTHERS, "other programs used {} of the processors"),
            (
                self.stolen,
                MOST_STOLEN,
                "the host of this virtual machine took {} of its processors",
            ),
            (
                self.throttled,
                MOST_THROTTLED,
                "the control group was throttled in {} of its periods",
            ),
            (self.spread, MOST_SPREAD, "repeated samples had a spread of {}"),
        )
        return tuple(
            words.format(units.percent(share))
            for share, most, words in told
            if share is not None and share >= most
        )

    @property
    def is_disturbed(self) -> bool:
        """Whether rates are most likely too low and times too long."""
        return bool(self.causes)

    def worst(self, other: Self | None) -> Self:
        """The larger share of each, of two measurements that make one profile."""
        if other is None:
            return self
        worst: dict[str, float] = {}
        # What one of them could not see the other may have seen.
        for one in (self, other):
            known = {k: share for k, share in structs.asdict(one).items() if share is not None}
            worst |= {name: max(share, worst.get(name, share)) for name, share in known.items()}
        return structs.replace(self, **worst)

    def __str__(self) -> str:
        return " and ".join(self.causes) or "nothing disturbed it"
