"""Batches of many shapes: a plan that was chosen for one of them is chosen again for several.

Captured programs serve one shape or two, and compiled ones serve many by slower code than one.
"""

import itertools
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline import units
from ridgeline.decision.heartbeat import Heartbeat
from ridgeline.decision.told_trials import doing_words
from ridgeline.errors import AbsentWorkerError, RidgelineError, SideEffectError, first_line
from ridgeline.execution import CALLED, MODES
from ridgeline.plan import Choice, Execution, Plan
from ridgeline.planner import Candidate, Ranking
from ridgeline.planner.exchanges.periods import with_share
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.trials.trial_loop import Trial
from ridgeline.tensors.batch import Signature, signature

WATCHED_STEPS = 16
"""The first steps, in which batches that vary show it."""
MANY_SHAPES = 4
"""Among those: a usual shape and the last batch of an epoch are two."""
REASON = (
    f"batches have {MANY_SHAPES} shapes or more: the fastest on {MANY_SHAPES} of them, measured"
)


class ShapeWatch:
    """The shapes of the first batches, with an example of each, `MANY_SHAPES` at most."""

    def __init__(self) -> None:
        self.examples: list[Any] = []
        self._found: set[Signature] = set()
        self._num_steps = 0

    def is_over(self, batch: Any) -> bool:
        """Look at a batch; whether it is the last one to be looked at."""
        found = signature(batch)
        # Once they vary, further examples would only hold memory.
        if found not in self._found and not self.is_varied:
            self._found.add(found)
            self.examples.append(batch)
        self._num_steps += 1
        return self._num_steps == WATCHED_STEPS

    @property
    def is_varied(self) -> bool:
        """Whether no captured program could serve most of the batches."""
        return len(self._found) == MANY_SHAPES

    def enough_examples(self) -> list[Any]:
        """As many as where batches vary, some of them again: all workers make as many steps with theirs."""
        return [*itertools.islice(itertools.cycle(self.examples), MANY_SHAPES)]


def for_many_shapes(
    ranking: Ranking, trial: Trial, heartbeat: Heartbeat, tell: Callable[[str], None]
) -> Ranking:
    """The ranking with the plan first that is the fastest on batches of several shapes.

    Cost: A trial of each way of execution that takes any shape; compiling, where what was chosen compiles.
    """
    tell("batches vary in shape: choosing again among plans that take any")
    tried = []
    for candidate in _best_of_each(ranking):
        tell(f"trying {label(candidate.plan)} on {MANY_SHAPES} shapes")
        try:
            with heartbeat.during(doing_words(candidate.plan)):
                measured = with_share(
                    trial(candidate.plan), candidate.timeline, candidate.plan.sync
                )
        except (AbsentWorkerError, SideEffectError):
            raise
        except RidgelineError as error:
            tell(f"  failed: {first_line(error)}")
            continue
        tell(f"  {units.nanoseconds(measured.step_ns)} a step")
        tried.append(msgspec.structs.replace(candidate, measured=measured))
    if not tried:
        return ranking
    # By the seconds of these batches: the cost of compiling is spent by now.
    best = min(tried, key=lambda candidate: candidate.step_s)
    best = msgspec.structs.replace(best, plan=_explained(best.plan, ranking.best.plan), why=REASON)
    others = (c for c in ranking.candidates if c.plan.execution != best.plan.execution)
    return msgspec.structs.replace(
        ranking, candidates=(best, *others), notes=(*ranking.notes, REASON)
    )


def _best_of_each(ranking: Ranking) -> list[Candidate]:
    """Of each execution that takes any shape the candidate that was the fastest on one."""
    # Where the choice was against compiling, programs for many shapes are even less worth it.
    compiles = is_compiled(ranking.best.plan)
    found: dict[Execution, Candidate] = {}
    for candidate in ranking.candidates:
        execution = candidate.plan.execution
        is_known = candidate.measured is not None or execution == "eager"
        if execution not in CALLED or candidate.failure:
            continue
        if candidate.plan.sync.every > ranking.best.plan.sync.every:  # the choice was against it
            continue
        if MODES[execution].is_compiled and not (
            compiles and (is_known or execution == "compiled")
        ):
            continue
        if execution not in found or candidate.step_s < found[execution].step_s:
            found[execution] = candidate
    return [found[execution] for execution in CALLED if execution in found]


def _explained(plan: Plan, before: Plan) -> Plan:
    """The plan with a reason for its execution, and those that the knobs of the former plan had."""
    chosen = Choice(knob="execution", value=plan.execution, origin="search", reason=REASON)
    kept = [
        choice
        for choice in before.choices
        if choice.knob != "execution"
        and getattr(plan, choice.knob, None) == getattr(before, choice.knob, None)
    ]
    return msgspec.structs.replace(plan, choices=(chosen, *kept))
