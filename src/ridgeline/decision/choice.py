"""The choice of a plan for a script's own step: traced, measured, ranked and tried, in limited time."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.decision import varied
from ridgeline.decision.budget import Budget
from ridgeline.decision.heartbeat import Heartbeat, Say
from ridgeline.decision.memory import compile_times, lost_device, remembered
from ridgeline.decision.memory.recalling import PREDICTED_BEFORE, predicted_anew, tried_again
from ridgeline.decision.neighbours import explained, why_as_is
from ridgeline.decision.profiling import Profiling
from ridgeline.decision.rehearsal import Rehearsals
from ridgeline.decision.told_trials import ToldTrials
from ridgeline.decision.trial import LONGEST_S, Script, run_trial, taken_back
from ridgeline.decision.whole_step import OtherFailedError, phase_seconds
from ridgeline.errors import OutOfTimeError, SideEffectError
from ridgeline.machine import Machine
from ridgeline.optimizer_forms import calls_model
from ridgeline.packages.loaded_programs import ProgramWatch
from ridgeline.plan import Plan
from ridgeline.planner import Ranking, choose, deferred_compiling, doubted
from ridgeline.planner.exchanges.exchanges import may_encode
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.trials import staleness
from ridgeline.probe.measure import Known, known_machine
from ridgeline.programs.compiling import CompiledForms
from ridgeline.reach.side_effects import refuse_streams
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.step_identity import step_identity
from ridgeline.simulator.compiler.compile_time import compile_seconds
from ridgeline.timeline import Timeline
from ridgeline.tracing.opaque import opaque_timings
from ridgeline.workers.agree import failing_together, largest_of_workers, share_bytes, share_text
from ridgeline.workers.world import World
from ridgeline.workload import Workload


@dataclass(kw_only=True)
class PlanChoice:
    """How the step of a script is chosen.

    `make` makes the step of a plan, sharing compiled `forms`, which trials fill for the step that is kept.
    `describe` traces the step, once, and takes what `trace` is to check; all workers have the same workload.
    `seconds` as of `choose`; `machine` is the user's profile, or what was measured; `notes` say what
    went otherwise than planned.
    """

    world: World
    script: Script
    make: Callable[[Plan], PlannedStep]
    describe: Callable[[Callable[[bool], None]], Workload]
    allow: tuple[str, ...]
    steps: int | None
    seconds: float | None
    machine: Machine | None
    say: Say
    forms: CompiledForms
    clip_norm: float | None = None
    notes: list[str] = field(default_factory=list)
    _examples: Sequence[Any] = field(default=(), init=False)
    _compile_factor: float = field(default=1.0, init=False)
    _stopped_factor: float = field(default=0.0, init=False)
    _spare_s: float | None = field(default=None, init=False)
    _why_as_is: str = field(default="", init=False)
    _kept: tuple[Path, str, str] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._budget = Budget(self.seconds, self.world)
        self._heartbeat = Heartbeat(self.say if self.world.rank == 0 else None)
        told = ToldTrials(
            self._trial,
            lambda plan: self._compile_factor * compile_seconds(self._described(), plan.execution),
            self._heartbeat,
            left=self._left,
        )
        self._told = told
        # A ranking may be made twice, by the old profile and a new one; trials say the same for both.
        self._once = staleness.remembered(told)
        self._again = ToldTrials(
            self._trial, lambda plan: 0.0, self._heartbeat, left=self._left, words="trying again"
        )
        self._rehearse = Rehearsals(self.script, self.world, self.forms)

    def rank(self, example: Any) -> Ranking | None:
        """The ranking whose best plan is to run; None where the step runs as it was written: see `notes`.

        Raises:
            RidgelineError: see `choose`; what the user's own step raises passes through.
        """
        self._examples = (example,)
        # Made anew: seconds count from the first batch, not from when the script made its step.
        self._budget = Budget(self.seconds, self.world)
        if calls_model(self.script.optimizer):
            self._run_as_written(
                f"since {type(self.script.optimizer).__name__} calls the loss any number of times, so no "
                "trial shows how long a step takes; plan=rl.Plan(execution='compiled') compiles the loss"
            )
            return None
        try:
            self._check_streams()
            if "random" not in self.allow:
                # Shared: which steps are still there on a worker is up to its collector.
                self._why_as_is = share_text(why_as_is(self.script), self.world)
            with self._heartbeat:
                ranking = self._ranked()
            self._spare_s = None if self.seconds is None else max(0.0, self._left())
            return ranking
        except OutOfTimeError as error:
            why = f"since there was no time to choose: {error}"
        except SideEffectError as error:
            why = f"since a trial could not be taken back: {error}"
        self._run_as_written(why)
        return None

    def _run_as_written(self, why: str) -> None:
        note = f"the step runs as it was written, {why}"
        self._tell(note)
        self.notes.insert(0, note)  # before what is only to be known of the profile

    def rank_for(self, ranking: Ranking, examples: Sequence[Any]) -> Ranking:
        """A ranking with the plan first that is the fastest on batches of these shapes."""
        self._examples = examples
        # What the first choice has left of the seconds; batches are trained on meanwhile.
        self._budget = Budget(self._spare_s, self.world)
        with self._heartbeat:
            try:
                found = varied.for_many_shapes(ranking, self._trial, self._heartbeat, self._tell)
            except SideEffectError as error:
                self._tell(f"not chosen again, since a trial could not be taken back: {error}")
                return ranking
        self._note_change(ranking, found, varied.REASON)
        return found

    def rank_with_compiled(self, ranking: Ranking, example: Any) -> Ranking:
        """A ranking for which what compiles was tried too, in the midst of training: `deferred_compiling`."""
        assert self.machine is not None
        self._examples = (example,)
        seconds = deferred_compiling.deferred_s(ranking, device=self.world.kind)
        self._budget = Budget(seconds, self.world)
        # What was measured before was measured on another batch.
        self._once = staleness.remembered(self._told)
        self._tell("trained for as long as compiling takes: trying compiled plans")
        try:
            self._check_streams()
            with self._heartbeat:
                found = self._chosen(self.machine, seconds)
        except (OutOfTimeError, SideEffectError) as error:
            self._tell(f"not chosen again: {error}")
            return ranking
        self._note_change(ranking, found, deferred_compiling.REASON)
        self._keep(found)
        return found

    def _note_change(self, before: Ranking, after: Ranking, reason: str) -> None:
        if before.best.plan.settings != after.best.plan.settings:
            self.notes.append(reason)

    def _keep(self, ranking: Ranking) -> None:
        """Remember what was chosen, and what compiling took, for the next start of this step."""
        if self.world.rank or self._kept is None:
            return
        directory, step, key = self._kept
        compile_times.learn(
            directory, ranking, self._compile_factor, step=step, least=self._stopped_factor
        )
        if ranking.best.measured is not None:
            digests = self.forms.findings.digests
            profile = "" if self.machine is None else self.machine.measured_at
            problem = remembered.keep(directory, key, ranking, digests, profile=profile)
            self.notes += [problem] if problem else []

    def _check_streams(self) -> None:
        """Raise, on all workers, where the step of one can take from what cannot be put back."""
        other = SideEffectError("the step of another worker cannot be run again")
        with failing_together(self.world, other):
            refuse_streams(*self.script, list(self._examples))

    def _ranked(self) -> Ranking:
        if self.machine is not None:
            self._note(doubted.said(self.machine))
            return self._chosen(self.machine)
        known = known_machine()
        directory = known.directory
        parts = [
            known.machine.fingerprint,
            self.world.size,
            self.world.threads,
            sorted(self.allow),
            # In powers of two: a run of a few steps more is the same choice.
            self.steps and self.steps.bit_length(),
            self.clip_norm is None,
            bool(self._why_as_is),
            *step_identity(*self.script, self._examples[0]),
        ]
        at_leisure = remembered.key_of(parts)
        # Who gives more seconds wants more to be tried.
        hurried = None if self.seconds is None else int(self.seconds).bit_length()
        key = at_leisure if hurried is None else remembered.key_of([*parts, hurried])
        self._kept = directory, at_leisure, key
        factor = compile_times.load(directory).factor(at_leisure)
        self._compile_factor = float(share_text(repr(factor), self.world))
        profiling = self._profiling()
        again = profiling.why_again()
        # What was chosen by a profile that is to be measured again is chosen again, too.
        recalled = None if again else self._recalled(profiling, known, at_leisure, key)
        if recalled is not None:
            return recalled
        self.machine, ranking = profiling.choose(self._chosen, again)
        self._keep(ranking)
        return ranking

    def _profiling(self) -> Profiling:
        return Profiling(
            world=self.world,
            seconds=self.seconds,
            left=self._left,
            described=self._described,
            codecs=may_encode(self.allow),
            time_phases=self._phase_seconds,
            heartbeat=self._heartbeat,
            note=self._note,
        )

    def _alone(self, plan: Plan) -> PlannedStep:
        """The step of one worker, whichever others there are."""
        return PlannedStep(
            *self.script,
            plan,
            clip_norm=self.clip_norm,
            world=World(0, 1, self.world.local_rank, self.world.device),
            is_undone=True,
        )

    def _phase_seconds(self, plan: Plan, left_s: float) -> Mapping[str, float]:
        begun = taken_back(self._alone, plan, self.script, self._examples)
        with contextlib.ExitStack() as stack:
            with failing_together(self.world, OtherFailedError("it begins on no other worker")):
                step = stack.enter_context(begun)
            return phase_seconds(step, self._examples[0], self.world, left_s)

    def _recalled(self, profiling: Profiling, known: Known, *keys: str) -> Ranking | None:
        """The remembered choice, its plan tried once more; None where there is none or it does not hold."""
        mine, mine_key = None, ""
        if self.world.rank == 0:
            found = ((key, remembered.recall(known.directory, key)) for key in dict.fromkeys(keys))
            mine_key, mine = next(
                ((key, kept) for key, kept in found if kept is not None), ("", None)
            )
        # Programs that an earlier start has cleared need not be checked again here.
        if mine is not None:
            self.forms.findings.earlier_digests = frozenset(mine.digests)
        shared = share_bytes(b"" if mine is None else msgspec.json.encode(mine.ranking), self.world)
        if not shared:
            return None
        ranking = msgspec.json.decode(shared, type=Ranking)
        # Programs serve the prediction of plans that are not tried yet.
        again = functools.partial(self._trial, reads_programs=False)
        recalled = tried_again(ranking, again, self._heartbeat, self._tell)
        self.machine = known.machine if recalled is not None else None
        # Where nothing is kept of a machine, rates were assumed, and are still.
        is_kept = bool(known.machine.ceilings)
        is_same = mine is None or not is_kept or mine.profile == known.machine.measured_at
        if recalled is None or share_text("same" if is_same else "", self.world):
            return recalled
        machine = profiling.timed()
        if machine is None:
            self._note([PREDICTED_BEFORE])
            return recalled
        self.machine, workload = machine, self._described()
        machine = self._with_opaque(machine, workload)
        size, factor = self.world.size, self._compile_factor
        recalled = predicted_anew(recalled, machine, workload, size, factor)
        if mine is not None:
            profile, digests = machine.measured_at, mine.digests
            remembered.keep(known.directory, mine_key, recalled, digests, profile=profile)
        return recalled

    def _note(self, lines: Sequence[str]) -> None:
        """Keep what went otherwise than planned, each line once."""
        self.notes += [line for line in lines if line not in self.notes]

    def _described(self) -> Workload:
        with self._heartbeat.during("tracing the step"):
            return self.describe(self._budget.check)

    def _chosen(self, machine: Machine, seconds: float | None = None) -> Ranking:
        workload = self._described()
        fixed: dict[str, Any] = {"workers": self.world.size, "threads": self.world.threads}
        if self._why_as_is:
            fixed["memory_format"] = "as-is"
        ranking = choose(
            self._with_opaque(machine, workload),
            workload,
            world_size=self.world.size,
            fixed=fixed,
            allow=self.allow,
            steps=self.steps,
            trial=self._once,
            retrial=self._again,
            seconds=seconds or self.seconds,
            clock=self._budget.clock,
            compile_factor=self._compile_factor,
        )
        return explained(ranking, self._why_as_is) if self._why_as_is else ranking

    def _with_opaque(self, machine: Machine, workload: Workload) -> Machine:
        known = opaque_timings(workload, self.world.setting)
        return msgspec.structs.replace(machine, timings=(*machine.timings, *known))

    def _trial(self, plan: Plan, *, reads_programs: bool = True) -> Timeline:
        # Several workers, which may fail one by one, neither remember nor refuse.
        place = self._kept[:2] if self._kept is not None and self.world.size == 1 else None
        lost_device.refuse_if_lost(place, plan)
        try:
            return self._tried(plan, reads_programs=reads_programs)
        except Exception as error:
            if self.world.kind == "cuda" and plan.execution != "eager":
                lost_device.raise_if_lost(place, plan, error)
            raise

    def _tried(self, plan: Plan, *, reads_programs: bool) -> Timeline:
        self._limit_compiling()
        watch = ProgramWatch() if reads_programs else None
        rehearsed_s = self._rehearse(plan, self._examples[0])
        self._limit_compiling()  # of what the rehearsal has left
        begin = time.monotonic()
        try:
            measured = run_trial(
                self.make,
                plan,
                self.script,
                self._examples,
                self.world,
                self._left,
                watch,
                self._budget.hopeless_s,
            )
        except OutOfTimeError:
            # A plan that was remembered may not be traced yet, for which there is no time any more.
            if is_compiled(plan) and (
                assumed_s := compile_seconds(self._described(), plan.execution)
            ):  # it takes longer still, which the next choice is to know
                self._stopped_factor = (time.monotonic() - begin) / assumed_s
            raise
        self._budget.note(measured, plan.sync)
        rehearsed_s = largest_of_workers(rehearsed_s, self.world)
        if not rehearsed_s:
            return measured
        # What was compiled for the rehearsal the trial did not compile any more.
        prepared_s = measured.counters.get("compile_s", 0.0) + rehearsed_s
        counters = {**measured.counters, "compile_s": prepared_s}
        return msgspec.structs.replace(measured, counters=counters)

    def _limit_compiling(self) -> None:
        """Compiling on one of several workers keeps all others waiting, so it must end by itself."""
        if self.world.size > 1:  # a worker alone is stopped by its trial, whatever it does
            self.forms.limit_s = min(LONGEST_S, max(1.0, self._budget.left()))

    def _left(self) -> float:
        return self._budget.left()

    def _tell(self, line: str) -> None:
        self._heartbeat.tell(line)
