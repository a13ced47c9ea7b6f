"""How devices stand together in a cluster: hosts, racks, and the links that each of them shares."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from msgspec import structs

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.errors import MachineError
from ridgeline.laws.arguments import check

_LEVEL = re.compile(r"(\d+):(\d+(?:\.\d+)?)(kbit|mbit|gbit)(?::(\d+(?:\.\d+)?)(us|ms))?")
_PER_SECOND = {"us": 1e6, "ms": 1e3}


class Level(Value, frozen=True, kw_only=True):
    """Places of one kind, such as hosts or racks, each joined to the others by one link.

    `size` is how many of the level below stand in one: devices in a host, hosts in a rack. The link carries
    `rate_bytes_per_s` in each direction at once, which all devices in there share; a message between two
    such places is under way for `latency_s`, whatever it passes on the way.
    """

    size: int
    rate_bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Reject places that hold nothing, and links that carry nothing.

        Raises:
            LawError: a number is out of range.
        """
        check("size of a place in a cluster", self.size, least=1)
        check("rate_bytes_per_s", self.rate_bytes_per_s, above=0.0)
        check("latency_s", self.latency_s, least=0.0)

    def times(self, factor: float) -> Self:
        """The same places on links `factor` times as fast."""
        return structs.replace(
            self,
            rate_bytes_per_s=factor * self.rate_bytes_per_s,
            latency_s=self.latency_s / factor,
        )

    def __str__(self) -> str:
        rate = units.quantity(8 * self.rate_bytes_per_s, "bit/s")
        return f"{self.size} behind {rate}, {units.seconds(self.latency_s)}"


class Crossing(NamedTuple):
    """What a job passes on one level: `places` of it are used, holding `devices` each at most."""

    level: Level
    places: int
    devices: int


def crossings(cluster: Sequence[Level], workers: int) -> tuple[Crossing, ...]:
    """The levels that so many workers do not fit into one place of, innermost first.

    Example:
        >>> host = Level(size=8, rate_bytes_per_s=5e10)
        >>> [crossing.places for crossing in crossings((host,), 24)]
        [3]
        >>> crossings((host,), 8)
        ()
    """
    found: list[Crossing] = []
    devices = 1
    for level in cluster:
        devices *= level.size
        if devices < workers:
            found.append(Crossing(level, math.ceil(workers / devices), devices))
    return tuple(found)


def parse_cluster(text: str) -> tuple[Level, ...]:
    """The levels of a text such as `8:400gbit:5us,16:1600gbit:8us`, innermost first.

    That is: hosts of 8 devices, each host on a link of 400 Gbit/s, 5 us from the others; 16 of them in a rack
    whose link carries 1600 Gbit/s, 8 us from other racks. There are as many racks as it takes.

    Raises:
        MachineError: it is not written so, or a number is 0.

    Example:
        >>> parse_cluster("2:10gbit")
        (Level(size=2, rate_bytes_per_s=1250000000.0, latency_s=0.0),)
    """
    return tuple(_level(item.strip()) for item in text.split(","))


def _level(text: str) -> Level:
    found = _LEVEL.fullmatch(text)
    if found is None or not int(found[1]) or not float(found[2]):
        raise MachineError(
            f"wanted SIZE:RATE:LATENCY for each level of a cluster, got {text!r}; for example 8:400gbit:5us, "
            "hosts of 8 devices that are joined by 400 Gbit/s, 5 us apart"
        )
    return Level(
        size=int(found[1]),
        rate_bytes_per_s=float(found[2]) * units.BITS_PER_S[found[3]] / 8,
        latency_s=float(found[4]) / _PER_SECOND[found[5]] if found[4] else 0.0,
    )
