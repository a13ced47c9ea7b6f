"""Workers train by the same plan: another one is refused, not found as a hang or a wrong mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.synchronisation.serving import goes_ahead
from ridgeline.workers import attendance
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.rendezvous import rendezvous
from ridgeline.workers.roll_call import SAME_STEPS
from ridgeline.workers.world import World

MAY_DIFFER = ("threads", "feed", "choices")
"""What is a worker's own affair: its cores, its loader, and why the plan is as it is."""
MOST_NAMED = 3


def check_same_plan(plan: Plan, world: World, *, clip_norm: float | None = None) -> None:
    """Every worker must have the same plan, but for `MAY_DIFFER`, and clip to the same norm.

    Gradients are clipped to the total norm `clip_norm`; None leaves them. Another one on one worker would
    make its updates others, and show as state that differs, whose cause is hard to see.

    Raises:
        PlanError: on all workers, naming what differs from the first one.
        AbsentWorkerError: others do not come, as they make no step; names them.

    Cost: Two small all-gathers behind a rendezvous.
    """
    mine = msgspec.to_builtins(plan)
    for name in MAY_DIFFER:
        mine.pop(name, None)
    mine["clip_norm"] = clip_norm
    with rendezvous("TrainStep(...)", SAME_STEPS, world):
        told = gather_bytes(msgspec.json.encode(mine), world)
    if (present := attendance.of(world)) is not None:
        present.are_apart |= goes_ahead(plan.sync.options)
    everyone = [msgspec.json.decode(theirs) for theirs in told]
    first = dict(_fields(everyone[0]))
    for rank, other in zip(world.ranks(), everyone, strict=True):
        theirs = dict(_fields(other))
        differing = [
            f"{name}={theirs.get(name)!r} on rank {rank} and {first.get(name)!r} on rank {world.ranks()[0]}"
            for name in dict.fromkeys((*first, *theirs))
            if theirs.get(name) != first.get(name)
        ]
        if differing:
            more = len(differing) - MOST_NAMED
            got = "; ".join(differing[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
            same = "plan and clip_norm" if "clip_norm" in differing[-1] else "plan"
            raise PlanError(
                f"wanted the same {same} on all {world.size} workers, got {got}; give every worker the "
                f"same {same}"
            )


def _fields(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a plan, those of what it holds by their path."""
    for name, held in value.items():
        if isinstance(held, dict) and held:
            yield from _fields(held, f"{head}{name}.")
        else:
            yield f"{head}{name}", held
