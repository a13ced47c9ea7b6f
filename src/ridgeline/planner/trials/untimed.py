"""How much of a predicted step rests on rates instead of timings of its operators, and the doubt of that."""

from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.errors import MachineError
from ridgeline.planner.ranking import Ranking
from ridgeline.planner.request import PlanRequest
from ridgeline.simulator.model import as_run, setting_of
from ridgeline.simulator.pricing.pieces import price_step

ASSUMED_ERROR = 0.05
"""Fraction by which a prediction is taken to be off before any trial.

Source: assumed; the median that simulators calibrated on the same machine reach.
"""
UNTIMED_ERROR = 0.75
"""Fraction by which the prediction of a step is taken to be off of whose operators none was timed.

Source: measured; eleven networks on two cores of an Intel Xeon, rates assumed: 17 to 78 %, median 48 %.
"""
NOTED_SHARE = 0.02
"""Of the predicted step; less is not worth a word."""


class Untimed(NamedTuple):
    """The operators of a step that were not timed: how many of how many, and their share of its seconds."""

    count: int
    total: int
    share: float

    @property
    def error(self) -> float:
        """Fraction by which the prediction may be off."""
        return ASSUMED_ERROR + self.share * (UNTIMED_ERROR - ASSUMED_ERROR)


def with_doubt(request: PlanRequest, ranking: Ranking) -> Ranking:
    """The ranking with a note where operators of the best plan's step were not timed, and with a wider error.

    A trial measures the error itself, so then there is only the note.
    """
    best = ranking.best
    found = untimed(request, ranking)
    if found is None or found.share < NOTED_SHARE:
        return ranking
    name = request.workloads[best.plan.workers].name
    note = (
        f"{found.count} of {found.total} operators of {name}, {units.percent(found.share)} of its predicted "
        f"step, were not timed on this machine: predictions before a trial are assumed to be right within "
        f"{units.percent(found.error)} only"
    )
    return msgspec.structs.replace(
        ranking,
        error=ranking.error if best.measured is not None else found.error,
        notes=(*ranking.notes, note),
    )


def untimed(request: PlanRequest, ranking: Ranking) -> Untimed | None:
    """What of the best plan's step was not timed; None where its operators have no price."""
    plan = ranking.best.plan
    machine, workload = request.machine, as_run(request.workloads[plan.workers], plan)
    precision = "as-is" if workload.precision == plan.precision else plan.precision
    try:
        priced = price_step(machine, workload, setting_of(machine, workload, plan), precision)
    except MachineError:  # a plan that was read from the compiler's code may need no rates
        return None
    pieces = [
        piece
        for piece in (*priced.forward, *priced.backward, *priced.optimizer)
        if piece.has_kernel
    ]
    missing = [piece for piece in pieces if piece.source != "timing"]
    whole_s = sum(piece.lane_s for piece in pieces)
    share = sum(piece.lane_s for piece in missing) / whole_s if whole_s else 0.0
    return Untimed(len(missing), len(pieces), share)
