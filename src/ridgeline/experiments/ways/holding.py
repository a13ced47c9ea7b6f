"""Holding a case: who takes part is made, timed in turns and closed; a failure is a row of the table.

What is made of whom, and how results are compared, is in `contest` here and in that of `hybrid`.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ridgeline.experiments.contests import FAILURES, MOST_TURNS, Progress, dismiss, reason_of
from ridgeline.experiments.turns import Samples, take_turns
from ridgeline.experiments.ways.result import ContestRow

Turn = tuple[float, Exception | None]
"""Seconds of a run in a turn, or infinity and why there are none."""


class Runs(Protocol):
    """Who has been made: can be closed, and says something of itself by fields of its row."""

    @property
    def close(self) -> Callable[[], None]:
        """Ends it."""
        ...

    @property
    def remarks(self) -> Callable[[], Any]:
        """Returns a named tuple of fields of the row."""
        ...


Row = TypeVar("Row", bound=ContestRow)
Made = TypeVar("Made", bound=Runs)


class Holding(Generic[Row, Made]):
    """The rows of one case as they come to be, and those who run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._rows: dict[str, Row] = {}
        self._made: dict[str, Made] = {}

    def _failed(self, row: Row, error: Exception) -> Row:
        return msgspec.structs.replace(row, status="failed", reason=reason_of(error))

    def _fail(self, name: str, error: Exception) -> None:
        """One that ran fails in a turn."""
        self._rows[name] = self._failed(self._rows[name], error)

    def _turns(
        self,
        measures: Mapping[str, Callable[[], Turn]],
        *,
        limit_s: float,
        agree: Callable[[bool], bool] = bool,
    ) -> Samples:
        """Figures of all who never failed; who fails takes no further turn."""
        # All take all turns, or the samples of a turn would no longer belong together.
        turns = {name: self._turn(name, measure) for name, measure in measures.items()}
        samples = take_turns(turns, turns=MOST_TURNS, limit_s=limit_s, agree=agree)
        return {name: own for name, own in samples.items() if self._runs(name)}

    def _turn(self, name: str, measure: Callable[[], Turn]) -> Callable[[], float]:
        def turn() -> float:
            if not self._runs(name):
                # A figure for the turn, so that all have the same number; `_turns` leaves this rival out.
                return 0.0
            seconds, failure = measure()
            if failure is None:
                return seconds
            self._fail(name, failure)
            return 0.0

        return turn

    def _runs(self, name: str) -> bool:
        return self._rows[name].status == "measured"

    def _close(self) -> None:
        """Close all who were made, each asked before what it says of itself."""
        for name, made in self._made.items():
            # One that failed may have nothing to say of itself.
            with contextlib.suppress(*FAILURES):
                said = made.remarks()._asdict()
                self._rows[name] = msgspec.structs.replace(self._rows[name], **said)
            dismiss(made.close)
        self._made.clear()


def attempted(measure: Callable[[], float]) -> Turn:
    """A figure, or why there is none."""
    try:
        return measure(), None
    except FAILURES as error:
        return math.inf, error


def rooms_s(weights: Sequence[float], *, limit_s: float, least_s: float) -> Iterator[float]:
    """Seconds for each of several cases, asked when its turn comes: what earlier ones left over is shared.

    Args:
        weights: Share of each; 0 takes no time.
        limit_s: Seconds from the first on.
        least_s: For a case whose time earlier ones have used up.
    """
    end = time.perf_counter() + limit_s
    for index, weight in enumerate(weights):
        later = sum(weights[index:])
        share = weight / later if later else 0.0
        yield max(least_s, share * (end - time.perf_counter()))
