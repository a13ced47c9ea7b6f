"""What compiling takes on this host over what is assumed of it, learned from every trial that compiled.

A step that was compiled here before is expected to take that long again. What other steps took says something
about the host, and each about itself as well: one that the compiler cuts into many programs takes many times
what its number of operators says. So their median counts little while they are few.
"""

import contextlib
import math
import statistics
from pathlib import Path
from typing import ClassVar

from ridgeline.codec import Noun, Value
from ridgeline.errors import FileFormatError
from ridgeline.planner import Ranking
from ridgeline.planner.preparation import is_compiled

MOST_KEPT = 20
LEAST = 0.2
"""Below this share of what was expected the compiler had most of it in its cache."""


PRIOR = 2.0
"""As many steps as assumed, in whose company the others are counted."""


class CompileTime(Value, frozen=True, kw_only=True):
    """What compiling one step took: seconds over those assumed; `step` distinguishes it from others."""

    step: str
    ratio: float


class CompileTimes(Noun, frozen=True, kw_only=True):
    """What compiling took, oldest first."""

    kind: ClassVar[str] = "compile-times"

    known: tuple[CompileTime, ...] = ()

    def factor(self, step: str) -> float:
        """What is expected of a step over what is assumed: its own last ratio, else that of the host.

        Source: the median of n others is taken to the power of n / (n + PRIOR), a mean of logarithms with
        that many ones.
        """
        own = [entry.ratio for entry in self.known if entry.step == step]
        # The last one: torch or the host's compiler may have changed since.
        if own:
            return own[-1]
        if not self.known:
            return 1.0
        median = statistics.median(entry.ratio for entry in self.known)
        return math.exp(math.log(median) * len(self.known) / (len(self.known) + PRIOR))


def load(directory: Path) -> CompileTimes:
    """What is known of this host; nothing where the file is missing or damaged."""
    try:
        return CompileTimes.load(directory / "compile-times.json")
    except (FileFormatError, OSError):
        return CompileTimes()


def learn(
    directory: Path, ranking: Ranking, factor: float, *, step: str, least: float = 0.0
) -> None:
    """Add what the trials of a choice took; a directory that cannot be written keeps nothing.

    The expectations in the ranking were multiplied by `factor`. `least` are seconds over those assumed of a
    trial that was stopped: compiling takes longer, which says something only where it is more than what is
    known.
    """
    ratios = [
        factor * c.compile_s / c.timeline.counters["compile_s"]
        for c in ranking.candidates
        if c.measured is not None
        and is_compiled(c.plan)
        and c.timeline.counters.get("compile_s")
        and c.compile_s > LEAST * c.timeline.counters["compile_s"]
    ]
    # A trial that was stopped bounds from below; less than what was expected tells nothing.
    ratios += [least] if least > factor else []
    if not ratios:
        return
    # The largest of a choice: later ones found kernels of the first in the compiler's cache.
    known = (*load(directory).known, CompileTime(step=step, ratio=max(ratios)))[-MOST_KEPT:]
    with contextlib.suppress(OSError):
        CompileTimes(known=known).save(directory / "compile-times.json")
