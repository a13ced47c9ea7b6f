"""A collective starts when the last worker is there: the step of the slowest of them."""

from functools import partial

from ridgeline.machine import Machine
from ridgeline.plan import Plan
from ridgeline.simulator.model import StepModel
from ridgeline.simulator.pricing.pieces import Piece
from ridgeline.synchronisation import steps_between_meetings

_NOTHING = 1e-6
"""Of a step; what a what-if leaves of devices that differ when that is free."""


def of_slowest(model: StepModel, machine: Machine, plan: Plan) -> StepModel:
    """The step of the worker that the others wait for, given how much the devices of the machine differ.

    Everything that it computes, issues and encodes takes longer by the average factor of the slowest of the
    plan's workers; the collectives, in which nobody waits any more, take as long as before.

    `model` is the step of one worker; the plan says how many wait for each other, and after how many steps.

    Source: `laws.slowest_of`. The step of the mean delay stands for the mean of steps, which is the same
        where a step grows by the same time as its computing.
    """
    steps = steps_between_meetings(plan.sync)
    factor = machine.stragglers.factor(plan.workers, steps) if steps else 1.0
    # What is left of a factor of 1 is rounding, and no note is due for it.
    if factor < 1.0 + _NOTHING:
        return model
    note = (
        f"the slowest of {plan.workers} workers is taken to compute {factor:.3f} times as long as one alone: "
        f"devices differ as described ({machine.stragglers})"
    )
    slowed = partial(_slowed, factor=factor)
    return model._replace(
        pieces={name: tuple(map(slowed, held)) for name, held in model.pieces.items()},
        # Gaps between kernels are of the slow device as well; seconds on links are not.
        gap_s=factor * model.gap_s,
        replay_s=factor * model.replay_s,
        encodings={
            name: one._replace(before_s=factor * one.before_s, after_s=factor * one.after_s)
            for name, one in model.encodings.items()
        },
        late_reads=tuple(read._replace(update=slowed(read.update)) for read in model.late_reads),
        notes=(*model.notes, note),
    )


def _slowed(piece: Piece, factor: float) -> Piece:
    """A piece on a slower device; what limits it at best is that of the device as measured."""
    return piece._replace(
        work_s=factor * piece.work_s, fixed_s=factor * piece.fixed_s, host_s=factor * piece.host_s
    )
