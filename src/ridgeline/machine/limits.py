"""`Limit`: what a container, a batch system or a shell grants a process of what the host has."""

from typing import Literal

from ridgeline import units
from ridgeline.codec import Value
from ridgeline.machine.quantity import Amount

What = Literal["cores", "memory", "shared memory", "processes", "locked memory", "open files"]


class Limit(Value, frozen=True, kw_only=True):
    """One limit: `granted` of `whole`, by whom, and what follows from it.

    `unit` is `B` for bytes and empty for what is counted. `whole` is what the host has, or to what a process
    may raise the limit itself; None where neither is known.
    """

    what: What
    granted: Amount
    whole: Amount | None = None
    unit: Literal["", "B"] = ""
    by: str
    follows: str = ""

    @property
    def amount(self) -> str:
        """How much of how much, e.g. `2 of 64`."""
        # What the host has is left out where it is not known: a limit is worth telling by itself.
        return " of ".join(
            self._text(value) for value in (self.granted, self.whole) if value is not None
        )

    def __str__(self) -> str:
        return f"{self.what}: {self.amount} ({self.by})"

    def _text(self, value: float) -> str:
        if self.unit == "B":
            return units.num_bytes(value)
        # `:g` would write a million and more with an exponent.
        return f"{value:g}" if value < 1e6 else f"{value:.0f}"
