"""How unequal devices are: what those that wait for each other wait for."""

import math
import re
from typing import Any, Self

from msgspec import structs

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.errors import MachineError
from ridgeline.laws.arguments import check
from ridgeline.laws.order_statistics import MOST_SPREAD, slowest_of

_NUMBER = r"\d+(?:\.\d+)?"
_SPREAD = re.compile(rf"({_NUMBER})%")
_SLOW = re.compile(rf"({_NUMBER})x:(\d+)")
MOST_SLOWDOWN = 1000.0


class Stragglers(Value, frozen=True, kw_only=True):
    """How the computing of devices differs that do the same step.

    The time of each varies from step to step, by itself, with a relative standard deviation of `spread`;
    `slow` of them take `slowdown` times as long in every step. Of any workers at least one does not.
    """

    spread: float = 0.0
    slow: int = 0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        """Reject what is no spread, and slow devices that are fast, by a `LawError`."""
        check("spread of stragglers", self.spread, least=0.0, most=MOST_SPREAD)
        check("slow devices", self.slow, least=0)
        check("slowdown of slow devices", self.slowdown, least=1.0, most=MOST_SLOWDOWN)

    def factor(self, workers: int, steps: int = 1) -> float:
        """How many times as long the slowest of so many workers computes as one alone, on average.

        Workers wait for each other after so many steps: what varies from step to step is less of their sum.

        Raises:
            LawError: a number is below 1.
        """
        check("steps", steps, least=1)
        # Steps vary independently, so the deviation of their sum grows as the root of their number.
        spread = self.spread / math.sqrt(steps)
        return slowest_of(workers, spread, slow=self.slow, slowdown=self.slowdown)

    def times(self, factor: float) -> Self:
        """Devices that differ a `factor`th of that.

        Raises:
            LawError: they would differ too much.
        """
        # The delay is divided, not the whole time: half of a factor of 1.3 is 1.15.
        return structs.replace(
            self, spread=self.spread / factor, slowdown=1.0 + (self.slowdown - 1.0) / factor
        )

    def __str__(self) -> str:
        words = [f"{units.percent(self.spread)} from step to step"] * bool(self.spread)
        # Slow ones that take no longer than the others are none.
        if self.slow and self.slowdown > 1.0:
            words.append(f"{self.slow} of them {self.slowdown:.3g} times as slow")
        return ", ".join(words) or "all alike"


def parse_stragglers(text: str) -> Stragglers:
    """The devices of a text such as `5%,1.3x:2`: 5 % from step to step, and two that take 1.3 times as long.

    Raises:
        MachineError: it is not written so, one of them is there twice, or a number is out of range.

    Example:
        >>> parse_stragglers("5%")
        Stragglers(spread=0.05, slow=0, slowdown=1.0)
        >>> str(parse_stragglers("1.3x:1"))
        '1 of them 1.3 times as slow'
    """
    found: dict[str, Any] = {}
    for item in text.split(","):
        word = item.strip()
        given: dict[str, Any] = {}
        if spread := _SPREAD.fullmatch(word):
            given = {"spread": float(spread[1]) / 100.0}
        elif slow := _SLOW.fullmatch(word):
            given = {"slowdown": float(slow[1]), "slow": int(slow[2])}
        # Held to the limits of the laws here too, so that the error shows the text that was written.
        is_meant = (
            0.0 <= given.get("spread", 0.0) <= MOST_SPREAD
            and 1.0 <= given.get("slowdown", 1.0) <= MOST_SLOWDOWN
        )
        if not given or not is_meant or given.keys() & found.keys():
            raise MachineError(
                f"wanted SPREAD% up to {100 * MOST_SPREAD:g} %, FACTORx:COUNT with a factor from 1 to "
                f"{MOST_SLOWDOWN:g}, or one of each, got {word!r} in the stragglers {text!r}; for example "
                "5%,1.3x:1, devices that vary by 5 % from step to step, one of which takes 1.3 times as long"
            )
        found |= given
    return Stragglers(**found)
