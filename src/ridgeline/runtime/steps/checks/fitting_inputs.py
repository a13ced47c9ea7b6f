"""Perturbed inputs that the step as written can take: not every batch may be another one."""

import math
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ridgeline.errors import EquivalenceError, RidgelineError, first_line
from ridgeline.execution import Execution
from ridgeline.runtime.steps.checks.perturbation import is_whole, perturb_inputs
from ridgeline.runtime.steps.checks.step_difference import Outcome
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.world import World


def fitting_run(
    run: Callable[[], Outcome],
    inputs: Sequence[Tensor],
    originals: Sequence[Tensor],
    shift: int,
    world: World,
    notes: list[str],
    *,
    execution: Execution,
) -> Outcome:
    """What a step leaves on perturbed inputs, of which those stay as they were on whose others it fails.

    Some depend on each other: the batch sizes of a `PackedSequence` add up to the length of its data, boxes
    have an extent, points of which two are the same have no distance that could be differentiated.

    Args:
        run: The step as written; raises what that raises.
        inputs: Changed in place, for the runs that follow, too.
        originals: Their values.
        shift: The number of the perturbation; 0 changes nothing.
        world: Where there are several workers, all raise what one does.
        notes: Notified of what stayed.
        execution: The mode that is checked, for errors.

    Raises:
        EquivalenceError: the step gives no finite numbers, whatever it is given.
    """
    reason, loss = "", math.nan
    for what, perturb in _ways(inputs, originals, shift):
        perturb()
        try:
            found = run()
        except RidgelineError:
            raise
        except Exception as error:
            # Of several workers one alone would run again, and meet the others in other collectives.
            if what == _ALL or world.size > 1:
                raise
            reason = reason or f"raises {type(error).__name__}: {first_line(error)}"
            continue
        if not largest_of_workers(0.0 if found.is_finite() else 1.0, world):
            note = f"{what} in the check: on others the step as written {reason}"
            if reason and note not in notes:
                notes.append(note)
            return found
        loss = found.loss
        reason = reason or f"has a loss of {loss:.3g}, or parameters that are no numbers"
    raise EquivalenceError(
        f"wanted a step as written to compare execution={execution!r} with, got one whose loss is "
        f"{loss:.3g} and whose parameters are not numbers afterwards (inputs, parameters and "
        "learning rate perturbed); see why, or use execution='eager'"
    )


_ALL = "the batch stayed as it is"


def _ways(
    inputs: Sequence[Tensor], originals: Sequence[Tensor], shift: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """What stays, and how the inputs are changed: as much as possible first."""
    if shift:
        yield "", lambda: perturb_inputs(inputs, originals, shift)
        if any(map(is_whole, inputs)):
            what = "whole numbers of the batch stayed as they are"
            yield what, lambda: perturb_inputs(inputs, originals, shift, keeps_whole=True)
    yield _ALL, lambda: perturb_inputs(inputs, originals, 0)
