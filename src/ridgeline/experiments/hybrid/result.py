"""What the experiment found: frozen values, without torch."""

from typing import ClassVar, Literal

import msgspec

from ridgeline.execution import Purpose
from ridgeline.experiments.ways.result import (
    ContestCase,
    ContestExperiment,
    ContestRow,
    fastest_of,
)
from ridgeline.machine import Quantity

Kind = Literal["peer", "ridgeline", "bound"]
PURPOSES: dict[Purpose, str] = {"callable": "inference", "step": "training"}
"""Purpose to its word in titles."""
BASE = "eager"
"""The contender that all are compared with: the program as it is written."""


class HybridRow(ContestRow, frozen=True, kw_only=True):
    """One contender of a case.

    Attributes:
        name: Of the contender (`contender` in files), e.g. `torch.compile` or `ridgeline packaged`.
        kind: Ours, another's, or a bound that no program with ordinary semantics reaches.
        seconds: Per call or step (`call_s` in files).
        prepare_s: Seconds until it ran at full speed: making, compiling, checking, first calls.
        is_warm: Whether it could find in the compiler's cache what another contender had compiled.
        break_even: Calls after which preparing is earned back against eager; None: never, within the noise.
            Where the cache was warm, with the seconds of the first that compiled, if those were more.
        times_faster: Peer to how many times faster than it, turn by turn.
        difference: From eager: of outputs over their largest value, or of parameters after some
            steps over their change.
        overwrites: Whether a later call changes the output of an earlier one.
        chosen: What `auto` chose.
    """

    name: str = msgspec.field(name="contender")
    kind: Kind
    seconds: Quantity | None = msgspec.field(name="call_s", default=None)
    prepare_s: float | None = None
    is_warm: bool = False
    break_even: int | None = None
    times_faster: dict[str, Quantity] = {}
    overwrites: bool = False
    chosen: str = ""


class CaseResult(ContestCase, frozen=True, kw_only=True):
    """One model, called or trained, with all contenders; `seconds` is what the case took in all."""

    model: str
    purpose: Purpose
    rows: tuple[HybridRow, ...]
    seconds: float = 0.0

    def fastest(self, kind: Kind, *, may_overwrite: bool = True) -> HybridRow | None:
        """The contender of a kind with the least median; None without any.

        Args:
            kind: Of the contender.
            may_overwrite: Whether those count that do not keep the outputs of earlier calls.
        """
        return fastest_of(
            row for row in self.rows if row.kind == kind and (may_overwrite or not row.overwrites)
        )


class HybridExperiment(ContestExperiment, frozen=True, kw_only=True):
    """The whole experiment on one machine; saved as JSON."""

    kind: ClassVar[str] = "hybrid-experiment"

    cases: tuple[CaseResult, ...]
    notes: tuple[str, ...] = ()


def break_even(prepare_s: float, call_s: float, base_prepare_s: float, base_s: float) -> int | None:
    """Calls after which the total time is below that of the base; None when that never comes.

    Source: total = prepare + calls x call, solved for equal totals.
    """
    if call_s >= base_s:
        return None
    # What is ready sooner than the base has nothing to earn back.
    extra_s = max(0.0, prepare_s - base_prepare_s)
    return max(1, -int(-extra_s // (base_s - call_s)))
