"""Trials that people can follow: what is tried, signs of life while it is, and what it took."""

import math
from collections.abc import Callable

from ridgeline import units
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.errors import OutOfTimeError, first_line
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.trials.trial_loop import Trial
from ridgeline.timeline import Timeline
from ridgeline.verdict import step_drift


class ToldTrials:
    """A trial that is reported before and after it runs.

    `compiling_s` are expected of a plan, 0 where it compiles nothing. The seconds `left` for the choice are
    the same on all workers, and not shown where infinite.
    """

    def __init__(
        self,
        run: Trial,
        compiling_s: Callable[[Plan], float],
        heartbeat: Heartbeat,
        *,
        left: Callable[[], float] = lambda: math.inf,
        words: str = "trying",
    ) -> None:
        self._run = run
        self._words = words
        self._expected_s = compiling_s
        self._heartbeat = heartbeat
        self._left = left
        self._announced: set[tuple[str, ...]] = set()

    def __call__(self, plan: Plan) -> Timeline:
        """The measured timeline of the plan; what the trial raises passes through, its first line told."""
        words, left_s = f"{self._words} {label(plan)}", self._left()
        compiling_s = self._compiling_s(plan)
        if compiling_s:
            words += f", compiling it first for about {units.seconds(compiling_s)}"
        if math.isfinite(left_s):
            words += f" ({units.seconds(max(0.0, left_s))} left)"
        self._heartbeat.tell(words)
        try:
            with self._heartbeat.during(doing_words(plan), compiling_s):
                measured = self._run(plan)
        except Exception as error:
            # Being stopped for time says nothing of the plan.
            how = "stopped" if isinstance(error, OutOfTimeError) else "failed"
            first = first_line(error, type(error).__name__)
            self._heartbeat.tell(f"  {how}: {first}")
            raise
        self._heartbeat.tell(f"  {trial_words(measured)}")
        return measured

    def _compiling_s(self, plan: Plan) -> float:
        """Seconds of compiling to report before a trial, once for each form, which its modes share."""
        form = (
            str(plan.workers),
            MODES[plan.execution].form,
            str(MODES[plan.execution].replays_model),
            plan.precision,
            plan.memory_format,
            plan.kernels,
        )
        if form in self._announced:
            return 0.0
        self._announced.add(form)
        return self._expected_s(plan)


def doing_words(plan: Plan) -> str:
    """What is under way while a plan is tried."""
    return "compiling and trying it" if is_compiled(plan) else "trying it"


def trial_words(measured: Timeline) -> str:
    """What a trial took: a step, how the machine drifted meanwhile, and once the preparation.

    No step contains the preparation.
    """
    words = f"{units.nanoseconds(measured.step_ns)} a step"
    drift = step_drift(measured)
    if drift is not None:
        words += f", drift {100 * drift:+.1f} %"
    prepared_s = measured.counters.get("compile_s", 0.0)
    return f"{words}, after {units.seconds(prepared_s)} of preparing it" if prepared_s else words
