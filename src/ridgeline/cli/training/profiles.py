"""The profile that a task is planned by: of this host, at each number of workers, held against the step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from ridgeline.cli.arguments.inputs import measured
from ridgeline.cli.arguments.wishes import Wishes
from ridgeline.cli.training.apart import phases_apart
from ridgeline.cli.training.worker import TrialRequest
from ridgeline.decision import retaking
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import RidgelineError
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan
from ridgeline.planner.trials.whole_steps import held_against_step, is_long
from ridgeline.simulator.model import setting_of
from ridgeline.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TaskProfiles:
    """Makes the machine that a task's plans are ranked by, in process groups of their own.

    Attributes:
        known: What the cache has of this host.
        workloads: The step of each worker, by the number of workers.
        wishes: See `Wishes`.
        requested: The trial of a plan.
        heartbeat: Reports what is under way.
    """

    known: Machine
    workloads: Mapping[int, Workload]
    wishes: Wishes
    requested: Callable[[Plan], TrialRequest]
    heartbeat: Heartbeat

    def of_all(self, refresh: bool) -> Machine:
        """This machine, measured for every number of workers.

        Raises:
            LaunchError: a measuring process failed.
        """
        return self._of(list(self.workloads), refresh)

    def retaken(self, refresh: bool) -> Machine:
        """See `of_all`; a profile that is measured again for a doubt counts how often."""
        machine = self.of_all(refresh)
        return mark(machine, "", self.known.retakes + 1) if refresh else machine

    def of(self, workers: int) -> Machine:
        """This machine with the timings that the step of so many workers still lacks.

        Raises:
            LaunchError: a measuring process failed.
        """
        return self._of([workers], refresh=False)

    def _of(self, counts: Sequence[int], refresh: bool) -> Machine:
        machine = self.known
        for count in counts:
            machine = measured(
                self.workloads[count],
                self._setting(machine, count),
                self.heartbeat,
                codecs=self.wishes.may_encode,
                refresh=refresh,
            )
            refresh = False  # what was measured for the first is kept for the others
        return self._held(machine, counts)

    def _held(self, machine: Machine, counts: Sequence[int]) -> Machine:
        """The machine whose operators add up to the task's step.

        On GPUs for the largest number of workers alone: starting them there takes longer than the result is
        worth.
        """
        for count in counts[-1:] if machine.device_kind == "cuda" else counts:
            setting = self._setting(machine, count)
            request = self.requested(Plan(workers=count, threads=setting.threads))
            phases = partial(phases_apart, request)
            machine = held_against_task(
                machine, self.workloads[count], setting, phases, self.heartbeat
            )
        return machine

    def _setting(self, machine: Machine, workers: int) -> Setting:
        shape = self.wishes.plan or Plan(workers=workers, threads=self.wishes.threads or 0)
        return setting_of(machine, self.workloads[workers], shape)


def held_against_task(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    phases: Callable[[], dict[str, float]],
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


def why_again(machine: Machine, heartbeat: Heartbeat) -> str:
    """Why a saved profile is to be measured again now, empty where it is not; the reasons are reported.

    Cost: Where the profile is doubtful, listens to the host for 0.3 s.
    """
    from ridgeline.probe.host.load import listen

    found = retaking.due(machine, listen)
    # Also where it is not measured again: the user sees that it was doubted.
    for line in found.lines:
        heartbeat.tell(line)
    return found.why


def mark(machine: Machine, suspect: str, retakes: int) -> Machine:
    """The machine, and its profile in the cache, with what is thought of it; see `probe.measure.marked`."""
    from ridgeline.probe.measure import marked

    return marked(machine, suspect, retakes)


def unmarked(machine: Machine, suspect: str, retakes: int) -> Machine:
    """The machine as it is: worker 0 marks the profile."""
    return machine
