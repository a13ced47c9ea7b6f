"""The plan that a script gives: a plan, or the path of a saved one."""

from pathlib import Path

from ridgeline.errors import PlanError
from ridgeline.plan import Plan


def given_plan(plan: Plan | str | Path) -> Plan:
    """The plan, loaded if it is a path.

    Raises:
        PlanError: there is no such file.
    """
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str | Path) or not Path(plan).is_file():
        raise PlanError(
            f"wanted plan='auto', a Plan or the path of a saved one, got {plan!r}; an execution goes into a "
            "plan, for example rl.Plan(execution='eager')"
        )
    return Plan.load(plan)
