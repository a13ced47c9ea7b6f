"""Trials of plans, one after the other: each corrects what is predicted of its relatives."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ridgeline.errors import (
    AbsentWorkerError,
    CaptureError,
    DeviceLostError,
    ObstacleError,
    OutOfTimeError,
    RidgelineError,
    SideEffectError,
)
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.periods import with_share
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import allowed_s, is_compiled
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.request import PlanRequest
from ridgeline.planner.trials.readings import read_again
from ridgeline.planner.trials.relatives import corrected
from ridgeline.planner.trials.trial_steps import trial_steps
from ridgeline.planner.trials.trials import COMPILE_MAY_TAKE, Room, left_untried, next_trial
from ridgeline.timeline import Timeline
from ridgeline.verdict import verify

Trial = Callable[[Plan], Timeline]
BRIEF_S = 2.0
"""What compiles nothing is tried for so long though the time is over, where no seconds were given: a capture
of a short step, which may be twice as fast as what was compiled."""
AS_WRITTEN: dict[str, str] = {
    "execution": "eager", "precision": "as-is", "memory_format": "as-is", "optimizer": "as-is",
    "kernels": "default", "random": "as-is",
}  # fmt: skip
"""Of a plan that runs the step as a plain loop does."""
NOT_TRIED = "not tried, since"
"""How the failure of a plan begins that was not tried because one like it failed."""


def since_now() -> Callable[[], float]:
    """A clock of seconds that begins at 0."""
    begin = time.monotonic()
    return lambda: time.monotonic() - begin


class Allowance(NamedTuple):
    """What all trials of a choice may take together.

    `first_compile_s` is what preparing the first plan took that was compiled: see `allowed_s`.
    """

    tries: int
    compile_s: float
    seconds: float | None
    steps: int | None
    device: str
    clock: Callable[[], float]
    first_compile_s: float | None = None

    def after(self, tried: Candidate) -> "Allowance":
        """What it is when a candidate was tried."""
        is_first = self.first_compile_s is None and is_compiled(tried.plan)
        # One that failed may have ended anywhere in its compiling.
        if not is_first or tried.measured is None:
            return self
        return self._replace(first_compile_s=tried.compile_s)

    def room(self, candidates: Sequence[Candidate], num_tried: int, overhead_s: float) -> Room:
        """What is left of it.

        On a GPU, where compiling seldom loses and what it takes is guessed, the first program is begun even
        if there may not be time to finish it. While nothing that was compiled is the fastest, what a user
        would write has the time that the user gave.
        """
        clock_s = self.clock()
        given_s = math.inf if self.seconds is None else self.seconds
        tried = [c for c in candidates if c.measured is not None]
        compiled = [c.compile_s for c in tried if is_compiled(c.plan)]
        fastest = min(tried, key=lambda c: c.cost_s(self.steps), default=None)
        has_won = fastest is not None and is_compiled(fastest.plan)
        # Compiling is charged as measured, so a cached program leaves more of the budget than was expected.
        return Room(
            tries=self.tries - num_tried,
            compile_s=max(0.0, self.compile_s - sum(compiled)),
            seconds=allowed_s(self.first_compile_s, self.steps, self.seconds) - clock_s,
            plain_s=0.0 if has_won else given_s - clock_s,
            brief_s=BRIEF_S if self.seconds is None else 0.0,
            overhead_s=overhead_s,
            compile_share=COMPILE_MAY_TAKE if self.device == "cuda" and not compiled else 1.0,
        )


def tried_in_turn(
    request: PlanRequest,
    candidates: list[Candidate],
    allowance: Allowance,
    trial: Trial,
    more: Callable[[], list[Candidate]] = list,
) -> tuple[list[Candidate], list[str], Allowance]:
    """The candidates with what the trials measured, one trial after the other, and what was left out.

    The last of what is returned is the allowance of what is tried after them.

    `more` makes further candidates where no graph can hold the step; it is called once at most.
    """
    num_tried = 0
    notes: list[str] = []
    overheads: list[float] = []
    while True:
        overhead_s = statistics.fmean(overheads) if overheads else 0.0
        room = allowance.room(candidates, num_tried, overhead_s)
        index = next_trial(candidates, room, device=allowance.device, steps=allowance.steps)
        if index is None:
            return candidates, notes + _untried(candidates, room, allowance), allowance
        begin = allowance.clock()
        try:
            tried, has_obstacles = attempted(candidates[index], candidates, trial, request.fixed)
        except OutOfTimeError as error:  # so nothing else is tried either
            stopped = f"{label(candidates[index].plan)} was not tried to the end: {error}"
            notes += [stopped, *_untried(candidates, room, allowance)]
            return candidates, notes, allowance
        spent = allowance.clock() - begin
        allowance = allowance.after(tried)
        # A trial that failed may have ended anywhere, so its seconds say nothing of an overhead.
        if tried.measured is not None:
            steps_s = trial_steps(tried.plan, tried.step_s) * tried.step_s
            # What starting workers and checking took: the next trial will need as much.
            overheads.append(max(0.0, spent - tried.compile_s - steps_s))
        # In place: ties in what follows are broken by this order.
        candidates = [*candidates[:index], tried, *candidates[index + 1 :]]
        if has_obstacles:
            candidates = _without_graphs(candidates, tried, allowance.device)
            if not MODES[tried.plan.execution].replays_model:
                # Called once: `list` makes none, should another trial meet an obstacle.
                candidates, more = [*candidates, *more()], list
        candidates, told = read_again(request, candidates, tried)
        notes += told
        candidates = corrected(candidates)
        num_tried += 1


def _untried(candidates: Sequence[Candidate], room: Room, allowance: Allowance) -> list[str]:
    return left_untried(candidates, room, device=allowance.device, steps=allowance.steps)


def _without_graphs(
    candidates: Sequence[Candidate], tried: Candidate, device: str
) -> list[Candidate]:
    """The candidates, of which those to capture have failed too: the step or its model holds the obstacle."""
    first = tried.failure.splitlines()[0]
    failure = f"{NOT_TRIED} {label(tried.plan)} failed: {first}"
    return [
        msgspec.structs.replace(c, failure=failure)
        if _holds_alike(c.plan, tried.plan, device) and c.measured is None and not c.failure
        else c
        for c in candidates
    ]


def _is_plain(plan: Plan) -> bool:
    """Whether a plan runs the step as it was written, operator by operator."""
    return not is_compiled(plan) and not MODES[plan.execution].is_captured


def _as_written(plan: Plan, fixed: Mapping[str, object]) -> Plan:
    """The plan without what is our wish and not the user's: the user's own code on the user's own tensors."""
    wishes = {name: word for name, word in AS_WRITTEN.items() if name not in fixed}
    return msgspec.structs.replace(plan, **wishes)


def _holds_alike(plan: Plan, tried: Plan, device: str) -> bool:
    """Whether a plan captures what the tried one does; a compiled model may have failed for that alone."""
    mode = MODES[plan.execution]
    if MODES[tried.execution].replays_model:
        return mode.replays_model and (mode.is_compiled or not is_compiled(tried))
    return mode.is_replayed_on(device)


def attempted(
    candidate: Candidate, candidates: Sequence[Candidate], trial: Trial, fixed: Mapping[str, object]
) -> tuple[Candidate, bool]:
    """The candidate with what its trial measured, or why that failed; whether graphs cannot hold the step.

    Compilers and captures raise errors of any kind. Such a plan failed where a plainer one ran, or can still
    be tried; the user's own errors are raised by that one as they are. Several workers run the same code, so
    that it fails on all of them; what may fail on one is rehearsed by the trial.

    Raises:
        OutOfTimeError: no step of it could be measured in the seconds that are left.
        AbsentWorkerError: another worker is missing, so that no further trial can succeed either.
        DeviceLostError: it cost the process its device, likewise.
        SideEffectError: the step does what cannot be taken back, so that nothing is tried.
    """
    plan = candidate.plan
    try:
        measured = with_share(trial(plan), candidate.timeline, plan.sync)
        # Only to learn whether both can be compared; a trial that cannot be is a failed one.
        verify(candidate.timeline, measured)
    except (OutOfTimeError, AbsentWorkerError, SideEffectError, DeviceLostError):
        raise
    except Exception as error:
        is_ours = isinstance(error, RidgelineError)
        others = [c for c in candidates if c is not candidate and not c.failure]
        has_plain = any(_is_plain(c.plan) for c in others)
        written = _as_written(plan, fixed)
        if not is_ours and plan == written:
            raise
        if not is_ours and not has_plain:  # the user's errors come again without what we wished
            written = msgspec.structs.replace(candidate, plan=written)
            return attempted(written, candidates, trial, fixed)
        # Errors of torch's compiler run over pages; ours say in a few lines what to do.
        failure = str(error) if is_ours else f"{type(error).__name__}: {error}".splitlines()[0]
        is_of_model = MODES[plan.execution].replays_model and isinstance(error, CaptureError)
        has_obstacles = isinstance(error, ObstacleError) or is_of_model
        return msgspec.structs.replace(candidate, failure=failure), has_obstacles
    return msgspec.structs.replace(candidate, measured=measured), False
