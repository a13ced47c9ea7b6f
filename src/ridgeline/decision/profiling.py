"""The profile that a choice rests on: measured where the saved one has gaps, assumed where that cannot be."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from ridgeline import units
from ridgeline.decision import retaking
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import LaunchError, MachineError, OutOfTimeError, SideEffectError
from ridgeline.machine import Machine, Setting
from ridgeline.plan import Plan
from ridgeline.planner import Ranking
from ridgeline.planner.assumed import with_assumed_rates
from ridgeline.planner.exchanges.exchanges import may_encode
from ridgeline.planner.trials import staleness
from ridgeline.planner.trials.whole_steps import held_against_step, is_long
from ridgeline.probe.fitting import START_S
from ridgeline.probe.groups.group import Group
from ridgeline.probe.groups.worker_error import in_one_line
from ridgeline.probe.host.load import listen
from ridgeline.probe.measure import known_machine, marked, measure, missing_seconds, stand_by
from ridgeline.probe.rates_here import rates_here, seconds_here
from ridgeline.programs.compiler_import import importing_compiler
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Timeline
from ridgeline.tracing.opaque import is_opaque
from ridgeline.workers.agree import share_text
from ridgeline.workers.world import World
from ridgeline.workload import Workload

MOST_MEASURING_SHARE = 0.35
"""Of the seconds that were given; where the least takes more there are general rates, and trials decide."""
MOST_CHECKING_SHARE = 0.1
"""Of the seconds that are left, for the step that the timings of operators are held against."""


def timeline_of(machine: Machine, workload: Workload, plan: Plan, world: World) -> Timeline:
    """What the simulator says of a plan that is given."""
    if not plan.threads:  # those that torch has here, not a share of the cores
        plan = msgspec.structs.replace(plan, threads=world.threads)
    return simulate(machine, workload, plan, world_size=world.size)


def measured_here(workload: Workload, plan: Plan, world: World) -> Machine:
    """The profile for a plan that is given, measured where the saved one has gaps.

    All workers of the world call this.

    Raises:
        LaunchError: a measuring process failed.
    """
    return measure(
        workload=workload,
        settings=(world.setting,),
        codecs=may_encode((), plan),
        here=True,
        process_group=world.process_group,
    )


@dataclass(kw_only=True)
class Profiling:
    """Makes the machine that plans are ranked by.

    `seconds` that the choice may take are None, and those `left` infinite, without a limit. With `codecs`,
    encoding gradients is timed as well. `time_phases` times a step of an eager plan in so many seconds, see
    `whole_step.phase_seconds`; `note` keeps what went otherwise than planned.
    """

    world: World
    seconds: float | None
    left: Callable[[], float]
    described: Callable[[], Workload]
    codecs: bool
    time_phases: Callable[[Plan, float], Mapping[str, float]]
    heartbeat: Heartbeat
    note: Callable[[Sequence[str]], None]

    def why_again(self) -> str:
        """Why the saved profile is to be measured again, empty where it is not; the same on all workers.

        What there is to say of it is noted.

        Cost: Where the profile is doubtful, listens to the host for 0.3 s.
        """
        found = retaking.due(known_machine().machine, listen)
        self.note(found.lines)
        why = share_text(found.why, self.world)
        if not why:
            return ""
        # Without the workload: only whether rates can be measured again matters here.
        wanted_s, limit_s = self._wanted_s(None, refresh=True)
        if wanted_s <= limit_s:
            return why
        self.note([f"{why}; there is no time to measure it again"])
        return ""

    def choose(
        self, rank: Callable[[Machine], Ranking], again: str = ""
    ) -> tuple[Machine, Ranking]:
        """The machine and the ranking by it; see `staleness.choose_by_profile`."""
        is_alone = self.world.size == 1  # several workers measure in place
        # Ahead of the trace: interpreters and torch start while the step is traced.
        with stand_by(self.world.setting) if is_alone else contextlib.nullcontext() as group:
            return staleness.choose_by_profile(
                partial(self._retaken if again else self._profile, group),
                rank,
                agree=lambda why: share_text(why, self.world),
                say=self.heartbeat.tell,
                again=again,
                doubt=retaking.doubting(self._marked, self._tell),
            )

    def timed(self) -> Machine | None:
        """This machine with the timings that the step still lacks; None where there is no time for them."""
        try:
            wanted_s, limit_s = self._wanted_s(self._to_measure(), refresh=False)
            return self._profile(None, False) if wanted_s <= limit_s else None
        except OutOfTimeError:
            return None

    def _retaken(self, group: Group | None, refresh: bool) -> Machine | None:
        """The profile, measured again for a doubt, which is counted; None where there is no time."""
        before = known_machine().machine
        machine = self._profile(group, refresh)
        # The same, where there was no time after all.
        if machine is None or machine.measured_at == before.measured_at:
            return machine
        return self._marked(machine, "", before.retakes + 1)

    def _marked(self, machine: Machine, suspect: str, retakes: int) -> Machine:
        return marked(machine, suspect, retakes) if self.world.rank == 0 else machine

    def _profile(self, group: Group | None, refresh: bool) -> Machine | None:
        """This machine, gaps measured by `group`, which ends, or assumed; None without time to refresh."""
        workload, machine = self._to_measure(), None
        with group or contextlib.nullcontext():
            wanted_s, limit_s = self._wanted_s(workload, refresh=refresh)
            if group is not None:  # its processes have been starting while the step was traced
                wanted_s -= min(group.age_s, START_S[self.world.kind])
            if wanted_s <= limit_s:
                with importing_compiler(self.world.kind):
                    machine = self._measured(workload, group, refresh, wanted_s, limit_s)
        if machine is None:
            most, given = units.seconds(max(limit_s, 0.0)), units.seconds(self.seconds or 0.0)
            why = (
                f"that takes about {units.seconds(wanted_s)}, for which {most} of the {given} of the choice "
                "may be used"
            )
            if refresh:
                # What was measured once says more about a machine than what is assumed of any.
                self._tell(f"not measured again: {why}; the rates of that profile are kept")
                return None
            # Behind the import and the processes of the group, which would disturb it.
            machine = self._rated(why, limit_s)
        return self._held_against_step(machine)

    def _measured(
        self,
        workload: Workload,
        group: Group | None,
        refresh: bool,
        wanted_s: float,
        limit_s: float,
    ) -> Machine:
        setting = self.world.setting
        # What the profile had to say before is no news of this choice.
        before = () if refresh else known_machine().machine.warnings
        try:
            with self.heartbeat.during("measuring", wanted_s):
                machine = measure(
                    workload=workload,
                    settings=(setting,),
                    codecs=self.codecs,
                    refresh=refresh,
                    progress=self.heartbeat.tell,
                    here=True,
                    limit_s=limit_s,
                    process_group=self.world.process_group,
                    group=group,
                )
        except (LaunchError, MachineError) as error:
            why = f"the machine could not be measured ({in_one_line(error)}); rates are assumed"
            return self._assumed(setting, why)
        self.note([line for line in machine.warnings if line not in before])
        if any(entry.setting.device == setting.device for entry in machine.ceilings):
            return machine
        return with_assumed_rates(machine, setting, "rates that were not measured are assumed")

    def _rated(self, why: str, limit_s: float) -> Machine:
        """The machine with general rates, measured in this process; assumed where they take too long, too."""
        known, setting = known_machine().machine, self.world.setting
        # Rank 0 knows what is missing; where caches differ, others would take another way.
        wanted_s = float(share_text(repr(seconds_here(known, setting)), self.world))
        machine = None
        if wanted_s <= limit_s:
            with self.heartbeat.during("measuring rates", wanted_s):
                machine = rates_here(known, setting, self.world.process_group)
        if machine is None:
            return self._assumed(
                setting, f"not measured: {why}; rates that were not measured are assumed"
            )
        said = f"operators were not timed: {why}; they are priced by general rates of this machine"
        self._tell(said)
        return msgspec.structs.replace(machine, warnings=(said, *machine.warnings))

    def _wanted_s(self, workload: Workload | None, *, refresh: bool) -> tuple[float, float]:
        """Seconds that measuring takes, and that it may take; the same on all workers."""
        limit_s = math.inf
        if self.seconds is not None:
            limit_s = min(MOST_MEASURING_SHARE * self.seconds, self.left())
        missing_s = missing_seconds(
            workload, (self.world.setting,), codecs=self.codecs, refresh=refresh, limit_s=limit_s
        )
        return float(share_text(repr(missing_s), self.world)), limit_s

    def _held_against_step(self, machine: Machine) -> Machine:
        """The machine whose operators take as long as they do in a step of the user's, run as a whole."""
        workload = self.described()
        # Opaque phases are known by their seconds as a whole already: nothing of them is left to correct.
        if is_opaque(workload) or is_long(machine, workload, self.world.setting):
            return machine
        found = held_against_step(machine, workload, self.world.setting, self._phases())
        self.note(found.warnings[len(machine.warnings) :])
        return found

    def _phases(self) -> Mapping[str, float]:
        """Seconds of the phases of a step; none where it is too long to measure, or fails on a worker."""
        plan = Plan(workers=1, threads=self.world.threads)
        try:
            with self.heartbeat.during("timing a step"):
                return self.time_phases(plan, MOST_CHECKING_SHARE * self.left())
        except OutOfTimeError:
            return {}  # it is a long one, which the trials will measure
        except SideEffectError:
            if self.world.size == 1:
                raise
            return {}  # trials of several workers write as the step does
        except Exception as error:  # noqa: BLE001 - the user's, which comes again if the step is to run so
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            self.note(
                [f"operators were not compared with a whole step, which fails as written: {told}"]
            )
            return {}

    def _assumed(self, setting: Setting, why: str) -> Machine:
        """What is known of this machine, with assumed rates for the rest, and a note that says why."""
        self._tell(why)
        return with_assumed_rates(known_machine().machine, setting, why)

    def _tell(self, why: str) -> None:
        self.heartbeat.tell(why)
        self.note([why])

    def _to_measure(self) -> Workload:
        """The traces whose operators are timed: on a GPU, the step as written and, where allowed, in bf16."""
        workload = self.described()
        narrow = tuple(load for load in workload.variants if load.precision == "bf16")
        if self.world.kind == "cpu" or not narrow:
            return workload
        return msgspec.structs.replace(workload, variants=narrow)
