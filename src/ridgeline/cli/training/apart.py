"""Trials and timed steps in processes of their own: they can be ended whatever they do, as compilers need."""

import msgspec

from ridgeline import units
from ridgeline.cli.training.worker import TrialRequest, answered
from ridgeline.errors import LaunchError, ObstacleError
from ridgeline.planner.labels import label
from ridgeline.timeline import Timeline

TRIAL = "ridgeline.cli.training.worker:trial"
PHASES = "ridgeline.cli.training.worker:phases"


def try_apart(request: TrialRequest) -> Timeline:
    """The measured timeline of a plan.

    Raises:
        ObstacleError: what is to be captured holds what a graph cannot.
        LaunchError: the plan does not run for another reason, or what compiles did not end in time.

    Cost: Starts as many interpreters as the plan has workers.
    """
    from ridgeline.decision.trial import longest_s
    from ridgeline.probe.groups.group import WorkerError

    plan = request.plan
    limit_s = longest_s(plan)
    try:
        reply = answered(TRIAL, request, deadline_s=limit_s)
    except WorkerError as error:
        which = f"rank {error.rank} of {plan.workers}"
        # What a signal ended did not write its last line about that.
        last = f": {error.last_line}" if error.last_line and not error.signal else ""
        # A late one is stopped, and has raised nothing.
        if error.is_late:
            raise LaunchError(
                f"wanted a trial of {label(plan)} within {units.seconds(limit_s)}, got no result from "
                f"{which}{last}; it was stopped: if no other plan runs, name one by --plan"
            ) from error
        if error.raised.kind == ObstacleError.__name__:  # the choice has other plans then
            raise ObstacleError(error.raised.message) from error
        raise LaunchError(
            f"wanted a trial of {label(plan)}, got {error.how} from {which}{last}\n{error}"
        ) from error
    return msgspec.json.decode(reply, type=Timeline)


def phases_apart(request: TrialRequest) -> dict[str, float]:
    """Seconds of the phases of a step in processes of their own, on the worker that takes longest.

    Raises:
        LaunchError: a worker failed.

    Cost: Starts as many interpreters; see `decision.whole_step.phase_seconds`.
    """
    from ridgeline.probe.groups.group import WorkerError

    try:
        reply = answered(PHASES, request)
    except WorkerError as error:
        raise LaunchError(f"{error.how}: {error.last_line}") from error
    return msgspec.json.decode(reply, type=dict[str, float])
