"""What it costs to prepare a mode before its first step, and after how many steps that is earned back.

Compiling takes seconds to minutes, so a mode with a faster step may still be the slower one for a short run.
"""

import math
from collections.abc import Sequence

from ridgeline import units
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.ranking import Candidate

COMPILED_ERROR = 0.25
"""Fraction by which the step of a mode that compiles may be off when it was not tried.

Source: assumed; compiling the step of a ResNet-18 on an H200 changed it by -26 to +10 % of the same step as a
graph, where fusing alone would have predicted a gain every time.
"""
MOST_COMPILE_S = {"cpu": 0.0, "cuda": math.inf}
"""Seconds of expected compiling that trials may take when the length of the run is unknown.

On a CPU, where compiling takes as long and gains less, a script that only wants a few steps is not made to
wait for it; see `deferred_compiling` for the others. On a GPU a plan is compared with what `torch.compile`
would give, however long that takes to compile; see `allowed_s` for what comes after it.
"""
FIRST_COMPILE_SHARE = 1.5
FIRST_COMPILE_S = 15.0


def is_compiled(plan: Plan) -> bool:
    """Whether the plan's execution compiles."""
    return MODES[plan.execution].is_compiled


def is_compiled_plainly(plan: Plan) -> bool:
    """Whether a plan is `torch.compile` with its own defaults: what is chosen is compared with it.

    Where a program that a GPU replays was refused or failed, this one was not compiled yet.
    """
    return plan.execution == "compiled" and plan.kernels == "default"


def allowed_s(first_compile_s: float | None, steps: int | None, seconds: float | None) -> float:
    """Seconds that the whole choice may take, from its start.

    Those that the user gave. Else, where the length of the run is unknown, compiling once more is not worth
    more than half of what the first time took, and some seconds: a plan should not take much longer than
    `torch.compile`.

    `first_compile_s` is what preparing the first plan took that was compiled and measured; None before that.
    """
    if seconds is not None:
        return seconds
    if steps is not None or first_compile_s is None:
        return math.inf
    return FIRST_COMPILE_SHARE * first_compile_s + FIRST_COMPILE_S


def break_even_steps(candidate: Candidate, eager: Candidate | None) -> int | None:
    """Steps after which the candidate's preparation is earned back against the eager plan.

    None when it never is, or nothing eager was compared. Steps are measured where both were tried.

    Source: preparation / (eager step - step), rounded up.
    """
    if eager is None:
        return None
    is_measured = candidate.measured is not None and eager.measured is not None
    pair = (candidate, eager)
    # Both measured or both predicted: a prediction beside a measurement would show its own error as a gain.
    step_s, eager_s = (c.step_s if is_measured else c.timeline.step_ns * 1e-9 for c in pair)
    # By sample: the plans may train different numbers of samples in a step.
    samples = max(candidate.samples, 1)
    gain_s = eager_s / max(eager.samples, 1) - step_s / samples
    if gain_s <= 0.0:
        return None
    return max(1, math.ceil(candidate.compile_s / (gain_s * samples)))


def eager_rival(candidate: Candidate, candidates: Sequence[Candidate]) -> Candidate | None:
    """The best plan with as many workers that runs operator by operator, if any was compared."""
    plan = candidate.plan
    rivals = [
        c
        for c in candidates
        if not c.failure
        and (c.plan.execution, c.plan.workers, c.plan.precision)
        == ("eager", plan.workers, plan.precision)
    ]
    # A measured one before any that is only predicted, whatever that promises.
    return min(rivals, key=lambda c: (c.measured is None, c.sample_s), default=None)


def sum_words(candidate: Candidate, steps: int) -> str:
    """The whole run as a sum: `62.5 s = 52.0 s of compiling + 69 x 152 ms`."""
    total = f"{units.seconds(candidate.total_s(steps))} = "
    if candidate.compile_s:
        total += f"{units.seconds(candidate.compile_s)} of {_what(candidate.plan)} + "
    return f"{total}{steps} x {units.seconds(candidate.step_s)}"


def earning_words(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """When the candidate's preparation is earned back; empty when there is none or nothing to compare."""
    eager = eager_rival(candidate, candidates)
    if not candidate.compile_s or eager is None or eager is candidate:
        return ""
    steps = break_even_steps(candidate, eager)
    if steps is None:
        return "never earned back against eager"
    return f"earned back against eager after {steps} steps"


def preparing_words(candidate: Candidate, candidates: Sequence[Candidate]) -> str:
    """What preparing costs where the length of the run is unknown; empty when it costs nothing."""
    if not candidate.compile_s:
        return ""
    earned = earning_words(candidate, candidates)
    return (
        f"{units.seconds(candidate.compile_s)} of {_what(candidate.plan)} are not weighed, as the number of "
        f"steps is unknown{f': {earned}' if earned else ''}"
    )


def _what(plan: Plan) -> str:
    return "compiling" if is_compiled(plan) else "preparing"


def compile_budget_s(
    candidates: Sequence[Candidate], steps: int | None, *, device: str, share: float
) -> float:
    """Seconds of expected compiling that trials may take.

    Args:
        candidates: All that were simulated.
        steps: Steps of the run, if known.
        device: `cpu` or `cuda`; matters where the steps are unknown.
        share: Of a run of known length, which follows from the best plan without compiling.
    """
    if steps is None:
        return MOST_COMPILE_S[device]
    # The run without compiling is what the trials may take a share of; else compiling would pay for itself.
    plain = [c for c in candidates if not is_compiled(c.plan)]
    return share * min(c.total_s(steps) for c in plain or candidates)
