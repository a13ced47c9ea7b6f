"""A remembered choice is tried once more before it is trusted."""

from collections.abc import Callable

import msgspec

from ridgeline import units
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.decision.memory import remembered
from ridgeline.decision.told_trials import doing_words
from ridgeline.errors import AbsentWorkerError, DeviceLostError, OutOfTimeError, RidgelineError
from ridgeline.machine import Machine
from ridgeline.planner import Ranking
from ridgeline.planner.exchanges.periods import with_share
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.trials.readings import as_read
from ridgeline.planner.trials.trial_loop import Trial
from ridgeline.simulator.step import simulate
from ridgeline.workload import Workload

AS_REMEMBERED = 1.25
"""A plan that takes more than this multiple of the step that is remembered of it is chosen again."""
PREDICTED_BEFORE = (
    "predicted by an earlier start, from a profile that was measured again since; there is no time to time "
    "the operators of this step for the new one"
)


def tried_again(
    ranking: Ranking, trial: Trial, heartbeat: Heartbeat, tell: Callable[[str], None]
) -> Ranking | None:
    """The ranking with a new measurement of its best plan; None where it does not hold any more.

    Cost: One trial.
    """
    best = ranking.best
    tell(f"trying {label(best.plan)}, which an earlier start chose for this step")
    try:
        with heartbeat.during(doing_words(best.plan)):
            measured = with_share(trial(best.plan), best.timeline, best.plan.sync)
    except OutOfTimeError as error:
        # What compiles may have lost its cache since; that takes the time which the choice was to spare.
        if is_compiled(best.plan):
            tell(f"it was not ready in time ({error}): choosing again")
            return None
        tell(f"there is no time to try it ({error}): taken as remembered")
        return remembered.noted(ranking, best, "and not tried again, since there was no time")
    except (AbsentWorkerError, DeviceLostError):
        raise
    except RidgelineError as error:
        tell(f"it fails now ({error}): choosing again")
        return None
    # Only slower is suspicious: what is faster now is still the best that is known.
    if measured.step_ns * 1e-9 > AS_REMEMBERED * best.step_s:
        tell(
            f"it takes {units.nanoseconds(measured.step_ns)} now, where it took "
            f"{units.seconds(best.step_s)}: choosing again"
        )
        return None
    tell(f"  {units.nanoseconds(measured.step_ns)} a step, as remembered")
    again = msgspec.structs.replace(best, measured=measured)
    return remembered.noted(ranking, again, "and tried again")


def predicted_anew(
    ranking: Ranking, machine: Machine, workload: Workload, workers: int, compile_factor: float
) -> Ranking:
    """The ranking with a prediction of its best plan by a machine that was measured since.

    Raises:
        MachineError: the profile lacks what the step needs.
    """
    best = ranking.best
    timeline = simulate(
        machine, workload, best.plan, world_size=workers, compile_factor=compile_factor
    )
    best = msgspec.structs.replace(best, timeline=as_read(timeline, best.reading))
    return msgspec.structs.replace(ranking, candidates=(best, *ranking.candidates[1:]))
