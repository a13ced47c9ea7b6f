"""What compiling takes on this host over what is assumed of it, learned from every trial that compiled."""

import contextlib
import statistics
from pathlib import Path
from typing import ClassVar

from ridgeline.codec import Noun
from ridgeline.errors import FileFormatError
from ridgeline.planner import Ranking
from ridgeline.planner.preparation import is_compiled

MOST_KEPT = 20
LEAST = 0.2
"""Below this share of what was expected the compiler had most of it in its cache."""


class CompileTimes(Noun, frozen=True, kw_only=True):
    """Seconds of compiling measured over expected, oldest first."""

    kind: ClassVar[str] = "compile-times"

    ratios: tuple[float, ...] = ()

    @property
    def factor(self) -> float:
        """The median; 1 before anything was compiled."""
        return statistics.median(self.ratios) if self.ratios else 1.0


def load(directory: Path) -> CompileTimes:
    """What is known of this host; nothing where the file is missing or damaged."""
    try:
        return CompileTimes.load(directory / "compile-times.json")
    except (FileFormatError, OSError):
        return CompileTimes()


def learn(directory: Path, ranking: Ranking, factor: float, least: float = 0.0) -> None:
    """Add what the trials of a choice took; a directory that cannot be written keeps nothing.

    Args:
        directory: The cache.
        ranking: With trials.
        factor: By which the expectations in it were multiplied.
        least: Seconds over those assumed of a trial that was stopped: compiling takes longer than that. It
            tells something only where that is more than what is known.
    """
    ratios = [
        factor * c.compile_s / c.timeline.counters["compile_s"]
        for c in ranking.candidates
        if c.measured is not None
        and is_compiled(c.plan)
        and c.timeline.counters.get("compile_s")
        and c.compile_s > LEAST * c.timeline.counters["compile_s"]
    ]
    ratios += [least] if least > factor else []
    if not ratios:
        return
    known = (*load(directory).ratios, max(ratios))[-MOST_KEPT:]
    with contextlib.suppress(OSError):
        CompileTimes(ratios=known).save(directory / "compile-times.json")
