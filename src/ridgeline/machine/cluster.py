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
from ridgeline.laws.fair_sharing import Flow, fair_rates
from ridgeline.machine.quantity import MOST

_RATE = r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|tbit)(?:/s)?"
# In a fixed order, so that a second rate can only be the traffic of others.
_LEVEL = re.compile(rf"(\d+):{_RATE}(?::(\d+(?:\.\d+)?)(ns|us|ms|s))?(?::(\d+)jobs?)?(?::{_RATE})?")
MOST_JOBS = 1000
"""On one link beside this one; of more nothing would be left."""
_PER_SECOND = {"ns": 1e9, "us": 1e6, "ms": 1e3, "s": 1.0}


class Level(Value, frozen=True, kw_only=True):
    """Places of one kind, such as hosts or racks, each joined to the others by one link.

    `size` is how many of the level below stand in one: devices in a host, hosts in a rack. The link carries
    `rate_bytes_per_s` in each direction at once, which all devices in there share; a message between two
    such places is under way for `latency_s`, whatever it passes on the way.

    Others may use each of these links meanwhile: `other_jobs`, each of which would take all of it, and
    traffic that wants `other_bytes_per_s` in the direction that is full. A job is one flow there, whatever it
    sends.
    """

    size: int
    rate_bytes_per_s: float
    latency_s: float = 0.0
    other_jobs: int = 0
    other_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        """Reject places that hold nothing, and links that carry nothing, by a `LawError`."""
        check("size of a place in a cluster", self.size, least=1)
        check("rate_bytes_per_s", self.rate_bytes_per_s, above=0.0, most=MOST)
        check("latency_s", self.latency_s, least=0.0, most=MOST)
        check("other_jobs", self.other_jobs, least=0, most=MOST_JOBS)
        check("other_bytes_per_s", self.other_bytes_per_s, least=0.0, most=MOST)

    @property
    def share_bytes_per_s(self) -> float:
        """What others leave of the link: a fair share, by `laws.fair_rates`."""
        mine = Flow(("link",))
        others = [mine] * self.other_jobs
        # A flow that wants nothing is none to the law, so it is left out.
        if self.other_bytes_per_s:
            others.append(mine._replace(most_bytes_per_s=self.other_bytes_per_s))
        return fair_rates([mine, *others], {"link": self.rate_bytes_per_s})[0]

    def times(self, factor: float) -> Self:
        """The same places on links `factor` times as fast; others want as much as before."""
        return structs.replace(
            self,
            # A better network is both: it carries more and delivers sooner.
            rate_bytes_per_s=factor * self.rate_bytes_per_s,
            latency_s=self.latency_s / factor,
        )

    def __str__(self) -> str:
        rate, latency = _bits(self.rate_bytes_per_s), units.seconds(self.latency_s)
        words = f"{self.size} behind {rate}, {latency}"
        others: list[str] = []
        if self.other_jobs:
            others.append(units.counted(self.other_jobs, "other job"))
        if self.other_bytes_per_s:
            others.append(f"{_bits(self.other_bytes_per_s)} of others")
        if not others:
            return words
        return f"{words}, beside {' and '.join(others)}: {_bits(self.share_bytes_per_s)} left"


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
            # One place is filled before the next is begun, so that only the last may be used in part.
            found.append(Crossing(level, math.ceil(workers / devices), devices))
    return tuple(found)


def parse_cluster(text: str) -> tuple[Level, ...]:
    """The levels of a text such as `8:400gbit:5us,16:1600gbit:8us`, innermost first.

    That is: hosts of 8 devices, each host on a link of 400 Gbit/s, 5 us from the others; 16 of them in a rack
    whose link carries 1600 Gbit/s, 8 us from other racks. There are as many racks as it takes.

    Behind that may stand who else uses each of those links: `8:400gbit:5us:2jobs`, two jobs that would take
    all of it, as this one would; `8:400gbit:5us:100gbit`, traffic that wants 100 Gbit/s; or both, so.
    Case and spaces do not count, and `/s` may stand behind a rate.

    Raises:
        MachineError: it is not written so, a size or rate is 0, or others want more than a link carries.

    Example:
        >>> [str(level) for level in parse_cluster("2:10gbit, 8:40gbit:1ms:3jobs")]
        ['2 behind 10.0 Gbit/s, 0 s', '8 behind 40.0 Gbit/s, 1.00 ms, beside 3 other jobs: 10.0 Gbit/s left']
    """
    return tuple(_level(item.strip()) for item in text.split(","))


def _level(text: str) -> Level:
    # As rates are shown, too: 400 Gbit/s.
    found = _LEVEL.fullmatch(text.lower().replace(" ", ""))
    if found is None or not int(found[1]) or not float(found[2]):
        raise MachineError(
            f"wanted SIZE:RATE:LATENCY for each level of a cluster, got {text!r}; for example 8:400gbit:5us, "
            "hosts of 8 devices that are joined by 400 Gbit/s, 5 us apart, or 8:400gbit:5us:2jobs:100gbit, "
            "where two other jobs use those links, and traffic of 100 Gbit/s"
        )
    size, rate, unit, latency, latency_unit, jobs, taken, taken_unit = found.groups()
    carried = _bytes_per_s(rate, unit)
    wanted = _bytes_per_s(taken, taken_unit) if taken else 0.0
    # More would change no share, as it is cut to the link's rate; so it is taken for a mistake.
    if wanted > carried:
        raise MachineError(
            f"wanted other traffic that the link can carry, {_bits(carried)} at most, got {_bits(wanted)} in "
            f"{text!r}; write what would take all of it as jobs, such as 2jobs"
        )
    return Level(
        size=int(size),
        rate_bytes_per_s=carried,
        latency_s=float(latency) / _PER_SECOND[latency_unit] if latency else 0.0,
        other_jobs=int(jobs or 0),
        other_bytes_per_s=wanted,
    )


def _bytes_per_s(number: str, unit: str) -> float:
    return float(number) * units.BITS_PER_S[unit] / 8


def _bits(bytes_per_s: float) -> str:
    return units.quantity(8 * bytes_per_s, "bit/s")
