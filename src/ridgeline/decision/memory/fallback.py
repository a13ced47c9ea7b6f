"""What to train with where the plan that was chosen turns out not to run, though its trial did."""

import msgspec

from ridgeline.errors import RidgelineError
from ridgeline.planner import Ranking
from ridgeline.planner.labels import label


def without_best(ranking: Ranking | None, error: RidgelineError) -> Ranking | None:
    """The ranking with the best of the other plans that were tried in front; None where none was."""
    if ranking is None:
        return None
    failed = msgspec.structs.replace(ranking.best, measured=None, failure=str(error))
    # Only what was tried: after a failure nothing else is known to run.
    others = [c for c in ranking.candidates[1:] if c.measured is not None and not c.failure]
    if not others:
        return None
    best = min(others, key=lambda candidate: candidate.cost_s(ranking.steps))
    rest = (c for c in ranking.candidates[1:] if c is not best)
    note = (
        f"trained as {label(best.plan)}, since {label(failed.plan)} failed when training began, though its "
        f"trial did not: {error}"
    )
    return msgspec.structs.replace(
        ranking, candidates=(best, *rest, failed), notes=(note, *ranking.notes)
    )
