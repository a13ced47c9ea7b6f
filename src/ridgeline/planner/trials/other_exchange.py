"""One more trial behind the search: the fastest plan, its gradients exchanged by another algorithm.

Some algorithms make other kernels wait less, which simulations predict too roughly to rank all plans by. So
the plan that won is tried with them, where a GPU replays its step and the simulation does not say that they
lose. Its program is compiled already: the trial captures it again and runs it.

Buckets are those of the default unless the user set others. What won may have large ones, since all that
sends beside backward costs it as much as behind it; what costs it nothing is to begin early.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.exchanges import refusal
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.request import PlanRequest
from ridgeline.planner.trials.readings import read_again
from ridgeline.planner.trials.relatives import SHARED_S, corrected
from ridgeline.planner.trials.trial_loop import Trial, attempted
from ridgeline.planner.trials.trial_steps import trial_steps
from ridgeline.synchronisation import DEFAULT_ALGORITHM, DEFAULT_BUCKET_BYTES, is_exact, tried_last

MAY_LOSE = 0.05
"""An algorithm is tried though it is predicted to be slower by so much.

Source: assumed; on two H200s predictions of VGG-16 by copies over those by NCCL missed by up to 6 %.
"""


def with_other_exchanges(
    request: PlanRequest,
    candidates: list[Candidate],
    trial: Trial,
    simulated: Callable[[Sequence[Plan]], list[Candidate]],
    *,
    left_s: float = math.inf,
) -> tuple[list[Candidate], list[str]]:
    """The candidates with those that were tried here, and the algorithms of these.

    Raises:
        OutOfTimeError, AbsentWorkerError, SideEffectError: see `attempted`.

    Cost: One trial of a plan whose program is compiled, for each algorithm that may gain.
    """
    tried = [c for c in candidates if c.measured is not None and not c.failure]
    if not tried or "algorithm" in request.fixed:
        return candidates, []
    fastest = min(tried, key=lambda c: c.cost_s(request.steps))
    needed_s = SHARED_S + trial_steps(fastest.plan, fastest.step_s) * fastest.step_s
    names: list[str] = []
    for plan in _others(request, fastest.plan):
        won, other = sorted(simulated([fastest.plan, plan]), key=lambda c: c.plan == plan)
        loses = other.step_s > won.step_s * (1.0 + MAY_LOSE)
        if loses or left_s < needed_s * (1 + len(names)):
            continue
        (other,), _ = read_again(request, [other], fastest)
        *_, other = corrected([*candidates, other])
        last, _ = attempted(other, [*candidates, other], trial, request.fixed)
        candidates = [*candidates, last]
        names.append(last.plan.sync.algorithm)
    return candidates, names


def _others(request: PlanRequest, plan: Plan) -> list[Plan]:
    """The plan with each algorithm that is tried last."""
    is_plain = plan.sync.algorithm == DEFAULT_ALGORITHM and is_exact(plan.sync)
    if (
        plan.workers == 1
        or not is_plain
        or not MODES[plan.execution].is_replayed_on(request.device)
    ):
        return []
    bucket_bytes = request.fixed.get("bucket_bytes", DEFAULT_BUCKET_BYTES)
    ways = [
        msgspec.structs.replace(plan.sync, algorithm=name, bucket_bytes=bucket_bytes)
        for name in tried_last(request.device, plan.workers)
    ]
    return [
        msgspec.structs.replace(plan, sync=sync)
        for sync in ways
        if not refusal(sync, plan.workers, request.device)
    ]
