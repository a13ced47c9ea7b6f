"""Which ways to exchange gradients are compared: algorithms and compressions that are offered and allowed."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from ridgeline.errors import PlanError
from ridgeline.execution import MODES, is_checked, runs_uncaptured
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    UNCOMPRESSED,
    check_sync,
    check_words,
    is_exact,
    offered,
    offered_compressions,
    unsearched,
)

PERMISSION = "compression"
"""What `allow` names so that gradients may be sent with losses."""
APART_PERMISSION = "local-steps"
"""What `allow` names so that workers may train alone between exchanges of their parameters."""
UNKNOWN_LOSS = "what it does to accuracy is unknown until measured"
SEARCHED = ("algorithm", "compression", "every")
"""Fields of `Sync` that are searched; users may fix them. See `rhythms` for intervals."""
GIVEN = ("options",)
"""Fields of `Sync` that follow from others, unless the user fixes them."""
LONGER = (1, 1, 10, 50)
"""A longer interval is a larger change: it counts once for each of these that it exceeds, and more than a
compression in any case."""


def exchanges(
    fixed: Mapping[str, Any], allow: Collection[str], device: str, workers: int
) -> list[Sync]:
    """Every way to exchange in every step, or as often as is fixed, the default first; buckets are left open.

    Algorithms are compared that are offered and exact and may be faster here (see `uncompared`), and
    compressions that are offered and exact, or allowed. What the user fixed stands alone. Left out is what
    does not have the user's options, or takes more workers; for a worker alone all but one.
    """
    # What the user names is used wherever it runs, be it slow.
    slower = () if "algorithm" in fixed else tuple(unsearched(device, workers))
    found = [
        sync
        for sync in _named(fixed, allow, device)
        if sync.algorithm not in slower and not refusal(sync, workers, device)
    ]
    # A single worker would simulate the same step for each.
    return found[:1] if workers == 1 else found


def may_encode(allow: Collection[str], plan: Plan | None = None) -> bool:
    """Whether gradients may be encoded, so that what this takes has to be known.

    Without a plan it is searched, and what is allowed counts.
    """
    return PERMISSION in allow if plan is None else bool(COMPRESSIONS[plan.sync.compression].codec)


def uncompared(
    fixed: Mapping[str, Any], device: str, workers: int, tried: Collection[str] = ()
) -> list[str]:
    """Which algorithms are not simulated that could be run, and why, in a sentence; none where all are.

    `workers` is the largest number that is compared; algorithms in `tried` were tried all the same.
    """
    if "algorithm" in fixed or workers == 1:
        return []
    reasons = [
        f"{ALGORITHMS[name].label} ({why})"
        for name, why in unsearched(device, workers).items()
        if name not in tried
    ]
    return [f"ways to reduce that were not compared: {'; '.join(reasons)}"] if reasons else []


def check_exchanges(
    fixed: Mapping[str, Any], allow: Collection[str], device: str, workers: int
) -> None:
    """Raise a PlanError where what the user fixed leaves so many workers no way to exchange gradients."""
    refusals = [refusal(sync, workers, device) for sync in _named(fixed, allow, device)]
    if all(refusals):
        raise PlanError(refusals[0])


def exchanges_in(execution: Execution, fixed: Mapping[str, Any], device: str) -> bool:
    """Whether steps of a mode exchange as the user fixed it; a mode that is fixed as well is not judged."""
    if MODES[execution].is_one_program:
        return False
    if "execution" in fixed or "algorithm" not in fixed:
        return True
    entry = ALGORITHMS[fixed["algorithm"]]
    if not (entry.shards_update or entry.replaces_update):
        return True
    sync = Sync(algorithm=entry.name, options=fixed.get("options", {}))
    is_same = is_exact(sync) or not is_checked(execution)
    return is_same and runs_uncaptured(execution, device)


def exchange_changes(plan: Plan) -> int:
    """In how many ways gradients are exchanged other than by default, their buckets apart."""
    sync = plan.sync
    # One worker exchanges nothing, whatever words its plan has.
    if plan.workers == 1:
        return 0
    return sum(
        (
            sync.algorithm != DEFAULT_ALGORITHM,
            sync.compression != UNCOMPRESSED,
            bool(sync.options),
            # Several counts for one field, so that fewer changes always mean milder maths first.
            *(sync.every > steps for steps in LONGER),
        )
    )


def _named(fixed: Mapping[str, Any], allow: Collection[str], device: str) -> list[Sync]:
    """Every combination of words, whether or not it runs."""
    # One that is not exact is taken only where the user names it.
    algorithms = [name for name in offered(device) if ALGORITHMS[name].is_exact]
    compressions = [
        name
        for name in offered_compressions(device)
        if COMPRESSIONS[name].is_exact or PERMISSION in allow
    ]
    if "algorithm" in fixed:
        algorithms = [fixed["algorithm"]]
    if "compression" in fixed:
        compressions = [fixed["compression"]]
    given = {name: fixed[name] for name in ("options", "every") if name in fixed}
    return [
        Sync(algorithm=algorithm, compression=compression, **given)
        for algorithm, compression in itertools.product(algorithms, compressions)
    ]


def refusal(sync: Sync, workers: int, device: str) -> str:
    """Why a way to exchange gradients or parameters is not taken; empty where it is."""
    # Both checks: words of a plan made here were never checked by a plan's own constructor.
    try:
        check_words(sync)
        check_sync(sync, workers, device)
    except PlanError as error:
        return str(error)
    return ""
