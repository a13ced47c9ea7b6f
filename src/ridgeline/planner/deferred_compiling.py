"""When what compiles is worth a trial in a run of unknown length: once training has taken as long.

A script that only wants a few steps is not made to wait for a compiler. One that continues has by then spent
as much as compiling takes, and loses no more than that again if it ends the moment after.

Source: the ski-rental problem; renting until the price of buying is spent costs at most twice the optimum
(Karlin, Manasse, Rudolph, Sleator 1988).
"""

import math
from collections.abc import Sequence

from ridgeline.planner.preparation import FIRST_COMPILE_S, FIRST_COMPILE_SHARE, is_compiled
from ridgeline.planner.ranking import Candidate, Ranking
from ridgeline.planner.trials.trials import could_win

REASON = (
    "compiled plans were tried once training had taken as long as compiling does, and were faster"
)


def steps_before_compiling(ranking: Ranking, *, device: str) -> int | None:
    """Steps after which trials of what compiles have their turn; None where none is open, or could win."""
    best = ranking.best
    found = _open(ranking.candidates, device)
    # A run of known length has weighed compiling already, whatever it chose.
    if ranking.steps is not None or is_compiled(best.plan) or not found or not best.step_s:
        return None
    # By then the run has lasted as long as compiling takes. Whenever it ends after that, compiling has at
    # most doubled its time; if it ends before, nothing was lost.
    return max(1, math.ceil(min(c.compile_s for c in found) / best.step_s))


def deferred_s(ranking: Ranking, *, device: str) -> float:
    """Seconds that these trials may take: what `torch.compile` would, half as much again, and some more."""
    found = [c.compile_s for c in _open(ranking.candidates, device)]
    # The cheapest, since that is the one whose price the run has been waiting for.
    return FIRST_COMPILE_SHARE * min(found, default=0.0) + FIRST_COMPILE_S


def _open(candidates: Sequence[Candidate], device: str) -> list[Candidate]:
    """What compiles, was not tried, and may be faster than all that was."""
    # One compiled trial is what this waits for; its relatives were corrected by it then.
    if any(c.measured is not None and is_compiled(c.plan) for c in candidates):
        return []
    return [
        c
        for c in candidates
        if is_compiled(c.plan)
        and c.measured is None
        and not c.failure
        and could_win(c, candidates, device=device)
    ]
