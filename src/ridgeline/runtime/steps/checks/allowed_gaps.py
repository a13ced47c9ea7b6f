"""A difference between two ways of running a step beside what it may be, and the words for it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

UPDATE = "the update"
MOST_NAMED = 3


class Gap(NamedTuple):
    """How far a mode is from its reference in a perturbed step, and may be, in the change of `of`."""

    size: float
    allowed: float
    reference: str
    of: str = UPDATE

    def excess(self) -> float:
        """The size in units of what is allowed; nothing where all is, as beside draws that are no numbers."""
        # Infinity over infinity is no number, which `max` would take for the largest if it comes first.
        return self.size / self.allowed if math.isfinite(self.allowed) else 0.0


def refusal_text(execution: str, gap: Gap, count: int) -> str:
    """Why a mode is not used that was this far from its reference in one of so many steps."""
    wanted = f"wanted execution={execution!r} to equal {gap.reference} within {gap.allowed:.2g} of {gap.of}"
    if math.isinf(gap.size):
        return (
            f"{wanted}, got values that are no numbers, or parameters that one of both alone updates, over "
            f"{count} perturbed steps; behind a result that the loss leaves out compiled code gives "
            "gradients of zero, where a plain step gives none: use execution='eager'"
        )
    is_as_written = execution == "graph"  # which replays the operators of the eager step
    compiler = "" if is_as_written else ", or torch's compiler computes something otherwise"
    return (
        f"{wanted}, got a difference of {gap.size:.3g} over {count} perturbed steps; something in the step "
        "is baked in (a Python number, host randomness), random numbers are drawn in another order (those of "
        f"a transposed tensor){compiler}: use execution='eager'"
    )


def agreement_text(execution: str, gaps: Sequence[Gap], count: int) -> str:
    """How near a mode came to its reference in so many steps."""
    widest = max((gap for gap in gaps if gap.of == UPDATE), key=Gap.excess)
    return (
        f"{execution} equals {widest.reference} within {widest.size:.1e} of the update ({count} steps; "
        "inputs, parameters, learning rate and random state perturbed)"
    )


def few(names: Sequence[str]) -> str:
    """The first of them, for a note."""
    return ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
