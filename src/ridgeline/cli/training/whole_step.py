"""A task's own step, timed as a whole by as many workers as will train it, to hold its operators against."""

from typing import TYPE_CHECKING

import msgspec

from ridgeline.cli.training.worker import TrialRequest, answered
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import LaunchError, RidgelineError
from ridgeline.machine import Machine, Setting
from ridgeline.planner.trials.whole_steps import held_against_step, is_long
from ridgeline.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable


PHASES = "ridgeline.cli.training.worker:phases"
Phases = dict[str, float]


def held_against_task(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    phases: "Callable[[], Phases]",
    heartbeat: Heartbeat,
) -> Machine:
    """The machine whose operators add up to the task's step, see `held_against_step`.

    Args:
        machine: Measured.
        workload: The step of one worker.
        setting: Of all of them.
        phases: Times them.
        heartbeat: Reports what is under way, which phases were missed, and why it did not work.
    """
    try:
        if is_long(machine, workload, setting):
            return machine
        with heartbeat.during("timing a step"):
            seconds = phases()
    except RidgelineError as error:  # whatever fails here fails in a trial, which says it at length
        heartbeat.tell(
            f"operators were not compared with a whole step: {str(error).splitlines()[0]}"
        )
        return machine
    found = held_against_step(machine, workload, setting, seconds)
    # Warnings are appended, so that those behind the known ones are new.
    for line in found.warnings[len(machine.warnings) :]:
        heartbeat.tell(line)
    return found


def phases_apart(request: TrialRequest) -> Phases:
    """Seconds of the phases of a step in processes of their own, on the worker that takes longest.

    Args:
        request: Its plan names workers and threads.

    Raises:
        LaunchError: a worker failed.

    Cost: Starts as many interpreters; see `decision.whole_step.phase_seconds`.
    """
    from ridgeline.probe.groups.group import WorkerError

    try:
        reply = answered(PHASES, request)
    except WorkerError as error:
        raise LaunchError(f"{error.how}: {error.last_line}") from error
    return msgspec.json.decode(reply, type=Phases)
