"""Which rhythms are compared with an exchange in every step: what is allowed, and what a run has room for."""

from collections.abc import Collection, Mapping
from typing import Any

from ridgeline.execution import runs_uncaptured
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.exchanges import (
    APART_PERMISSION,
    PERMISSION,
    UNKNOWN_LOSS,
    refusal,
)
from ridgeline.planner.exchanges.periods import PRICED_APART
from ridgeline.planner.exchanges.pruning import Pruned
from ridgeline.planner.ranking import Candidate
from ridgeline.synchronisation import (
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    LEAST_EXCHANGES,
    RHYTHMS,
    UNCOMPRESSED,
    changed_words,
    trains_apart,
)
from ridgeline.workload import Workload

DECIDING = ("every", "options")
"""Fields of `Sync` by which users choose a rhythm themselves."""


def rhythms(
    fixed: Mapping[str, Any],
    allow: Collection[str],
    workload: Workload,
    plan: Plan,
    steps: int | None = None,
) -> tuple[list[Sync], list[Pruned]]:
    """Ways to train alone that are worth simulating, the mildest first; and those that take a longer run.

    None where they are not allowed, or the user decides by an interval or by options; and where a GPU replays
    the step, since every replay is the same.
    """
    if APART_PERMISSION not in allow or any(field in fixed for field in DECIDING):
        return [], []
    if plan.workers == 1 or not runs_uncaptured(plan.execution, workload.device):
        return [], []
    found: list[Sync] = []
    short: list[Pruned] = []
    for sync in known_rhythms(workload, fixed):
        if refusal(sync, plan.workers, workload.device) or not _may_send(sync, fixed, allow):
            continue
        if steps is not None and steps < LEAST_EXCHANGES * sync.every:
            reason = f"{steps} steps have fewer than {LEAST_EXCHANGES} exchanges, one in {sync.every} steps"
            short.append(Pruned(Plan(workers=plan.workers, sync=sync), reason, "train for longer"))
            continue
        found.append(sync)
    return found, short


def known_rhythms(workload: Workload, fixed: Mapping[str, Any] | None = None) -> list[Sync]:
    """The rhythms of the table, for the optimizer of this step.

    A compression that is fixed takes the place of theirs.
    """
    named = fixed or {}
    adapts = is_adaptive(workload)
    known = [r for r in RHYTHMS if "compression" not in named or r.compression == UNCOMPRESSED]
    return [
        Sync(
            algorithm=named.get("algorithm", DEFAULT_ALGORITHM),
            compression=named.get("compression", rhythm.compression),
            every=rhythm.every,
            options=rhythm.options(is_adaptive=adapts),
        )
        for rhythm in known
    ]


def _may_send(sync: Sync, fixed: Mapping[str, Any], allow: Collection[str]) -> bool:
    """Whether what travels may be encoded as a rhythm has it; a user who names a compression allows it."""
    return COMPRESSIONS[sync.compression].is_exact or "compression" in fixed or PERMISSION in allow


def is_adaptive(workload: Workload) -> bool:
    """Whether the optimizer divides by the size of gradients, as its operators show: Adam and its kin."""
    names = [op.name.lower() for op in workload.phase("optimizer")]
    # By operators, since the class of the optimizer is not in a trace: unfused Adam divides by `addcdiv`.
    return any("addcdiv" in name or "adam" in name for name in names)


def rhythm_notes(candidate: Candidate) -> list[str]:
    """What a plan changes whose workers train alone, and what its trial did not see; nothing for another."""
    plan, measured = candidate.plan, candidate.measured
    if plan.workers == 1 or not trains_apart(plan.sync):
        return []
    told = () if measured is None else measured.notes
    priced = [note for note in told if note.startswith(PRICED_APART)]
    return [f"{changed_words(plan.sync)}; {UNKNOWN_LOSS}", *priced]
