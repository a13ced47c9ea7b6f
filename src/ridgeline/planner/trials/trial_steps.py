"""How many steps a trial runs: many where they are short, few where each takes seconds, and an exchange."""

import math

from ridgeline.execution import MODES
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.periods import Sampling, sampling
from ridgeline.planner.preparation import is_compiled

MOST_WARM_STEPS = 7
WARM_S = 1.0
"""Libraries settle in the first steps; where those took as long as this, they may have."""
SETTLED = 0.95
"""A step that takes this share of the one before, or more, does not settle any more."""
LEAST_STEPS = 8
"""Measured steps where a step is no longer than `MEASURED_S`: the median of fewer is not quiet."""
FEWEST_STEPS = 3
MOST_STEPS = 100
MEASURED_S = 1.0
"""Seconds of steps that are measured where they are short; a GPU's clock settles meanwhile."""
LONGEST_S = 10.0
"""Of longer steps so many are measured as fit into this, but `FEWEST_STEPS` at least: what takes seconds,
over a slow link most of all, varies by little from step to step."""
LONGEST_PERIODS_S = 20.0
"""A period is measured, whole or in parts, where its steps without exchanges take no longer."""
HOPELESS = 1.5
"""A step of seconds that takes so many times as long as the fastest known one is measured once.

Source: steps on two shared cores, a minute apart, differed by up to 30 % (`run_off.CLOSE`), and a plan that
changes less is kept while it is slower by less than 25 % (`LEAST_GAIN`)."""
CHECK_STEPS = 6
"""A compiled step is compared with the eager one under three perturbations, see
`runtime/steps/checks/equivalence.py`."""


def first_steps(plan: Plan) -> int:
    """Steps after which the next one is as all that follow: libraries, compilers and captures are done.

    Source: `runtime/steps/graphs/graph.py` captures in the fourth step, `runtime/steps/whole_step/runner.py`
    compiles in the second; one more is needed to know what a step takes that prepares nothing.
    """
    mode = MODES[plan.execution]
    if mode.is_replayed:
        return 5
    if mode.is_one_program:
        return 3
    return 2 if mode.is_compiled or mode.replays_model else 1


def measured_steps(step_s: float, sync: Sync) -> Sampling:
    """Steps that are measured where one without exchange takes `step_s` seconds."""
    if step_s > MEASURED_S:
        steps = max(FEWEST_STEPS, min(LEAST_STEPS, math.floor(LONGEST_S / step_s)))
    else:
        steps = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(MEASURED_S / max(step_s, 1e-9))))
    return sampling(sync, steps, step_s, LONGEST_PERIODS_S)


def trial_steps(plan: Plan, step_s: float) -> int:
    """Steps that a trial runs in all: to warm up, to compare with the eager step, and those measured."""
    settling = math.ceil(WARM_S / max(step_s, 1e-9))
    warm = min(MOST_WARM_STEPS, max(2, first_steps(plan) - 1 + settling))
    return (
        warm + measured_steps(step_s, plan.sync).steps + (CHECK_STEPS if is_compiled(plan) else 0)
    )


def least_steps(plan: Plan) -> int:
    """Steps for which there must be time, or a trial is not begun.

    What compiles nothing is tried for a single measured step: a trial ends by itself when time is up.
    """
    if is_compiled(plan):
        return CHECK_STEPS + first_steps(plan) + FEWEST_STEPS
    return first_steps(plan) + 1
