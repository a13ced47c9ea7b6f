"""Perturbed inputs that the step as written can take: not every whole number may be another one."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ridgeline.errors import RidgelineError, first_line
from ridgeline.runtime.steps.checks.perturbation import is_whole, perturb_inputs
from ridgeline.workers.world import World

Judged = TypeVar("Judged")


def judged(
    judge: Callable[[int], Judged],
    inputs: Sequence[Tensor],
    originals: Sequence[Tensor],
    shift: int,
    world: World,
    notes: list[str],
) -> Judged:
    """What `judge` says of perturbed inputs; whole numbers stay where the step as written raises on others.

    Some depend on each other: the batch sizes of a `PackedSequence` add up to the length of its data.

    Args:
        judge: Runs the step under the perturbation of that number; raises what that raises.
        inputs: Changed in place.
        originals: Their values.
        shift: The number of the perturbation; 0 changes nothing.
        world: Where there are several workers, all raise what one does.
        notes: Notified of whole numbers that stayed.
    """
    perturb_inputs(inputs, originals, shift)
    try:
        return judge(shift)
    except RidgelineError:
        raise
    except Exception as error:
        # Of several workers one alone would run again, and meet the others in other collectives.
        if not shift or world.size > 1 or not any(map(is_whole, inputs)):
            raise
        note = (
            "whole numbers of the batch stayed as they are in the check: on others the step as written "
            f"raises {type(error).__name__}: {first_line(error)}"
        )
    perturb_inputs(inputs, originals, shift, keeps_whole=True)
    found = judge(shift)
    if note not in notes:
        notes.append(note)
    return found
