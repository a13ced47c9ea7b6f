"""What a script gives for the choice of a plan: a plan, the path of a saved one, or how to choose."""

from collections.abc import Collection
from pathlib import Path

from ridgeline.errors import PlanError
from ridgeline.optimizers.given import check_clip_norm
from ridgeline.plan import Plan
from ridgeline.planner.knobs import check_allowed
from ridgeline.runtime.steps.body.requirements import check_seconds


def given_plan(plan: Plan | str | Path) -> Plan:
    """The plan, loaded if it is a path; a PlanError where there is no such file."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path) or not Path(plan).is_file():
        raise PlanError(
            f"wanted plan='auto', a Plan or the path of a saved one, got {plan!r}; an execution goes into a "
            "plan, for example rl.Plan(execution='eager')"
        )
    return Plan.load(plan)


def check_choice(
    clip_norm: float | None, allow: Collection[str], steps: object, seconds: object
) -> None:
    """Raise a PlanError for what a choice could not go by, before anything is measured."""
    check_clip_norm(clip_norm)
    check_allowed(allow)
    check_seconds(seconds)
    # True is 1 to Python, and no number of steps.
    if steps is not None and (not isinstance(steps, int) or steps is True or steps < 1):
        raise PlanError(f"wanted steps as a whole number from 1, or None, got {steps!r}")
