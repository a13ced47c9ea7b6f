"""Plans that differ in how workers exchange what they learn: gradients or parameters, in which buckets."""

from collections.abc import Iterator

import msgspec

from ridgeline.errors import MachineError
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.buckets import is_worth_hiding, searched_bucket_bytes
from ridgeline.planner.exchanges.exchanges import exchanges
from ridgeline.planner.exchanges.pruning import Pruned, exchanging, fitting, losing
from ridgeline.planner.exchanges.rhythms import rhythms
from ridgeline.planner.request import PlanRequest
from ridgeline.simulator.pricing.pieces import bucket_gradients
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES, trains_apart


def with_first_way(request: PlanRequest, plan: Plan) -> Plan:
    """The plan with the way of exchange that is fixed or the default, by which its memory is judged."""
    # One that is fixed may need less than the default: each worker then keeps a part of the state.
    ways = exchanges(request.fixed, request.allow, request.device, plan.workers)
    return msgspec.structs.replace(plan, sync=ways[0]) if ways else plan


def exchanging_plans(request: PlanRequest, plan: Plan) -> tuple[list[Plan], list[Pruned]]:
    """The plan with every way of exchange worth simulating, and the ways that were ruled out.

    The other knobs of the plan are decided, and it fits in memory with the first way.
    """
    workload = request.workloads[plan.workers]
    # By number of workers: some algorithms need more of them than this plan has.
    ways = exchanges(request.fixed, request.allow, request.device, plan.workers)
    if not ways:
        reason = "has fewer workers than the exchange that is fixed takes"
        return [], [Pruned(plan, reason, "use more workers, or fix another exchange")]
    lost = losing(workload, plan, request.fixed, request.allow)
    apart, short = rhythms(request.fixed, request.allow, workload, plan, request.steps)
    may_split = "accumulate" not in request.fixed
    plans: list[Plan] = []
    pruned = [*lost.values(), *short]
    for sync in (*(way for way in ways if way.compression not in lost), *apart):
        way = msgspec.structs.replace(plan, sync=sync)
        refused = exchanging(workload, way)
        if refused is not None:
            pruned.append(refused)
            continue
        if sync != ways[0]:  # a residual, or common parameters, are one more copy, or two
            held = fitting(request.machine, workload, way, may_split=may_split)
            if isinstance(held, Pruned):
                pruned.append(held)
                continue
            way = held
        plans += _cut(request, way)
    return plans, pruned


def _cut(request: PlanRequest, plan: Plan) -> Iterator[Plan]:
    """The plan in every cut of buckets worth comparing."""
    for bucket_bytes in _bucket_choices(request, plan):
        sync = msgspec.structs.replace(plan.sync, bucket_bytes=bucket_bytes)
        yield msgspec.structs.replace(plan, sync=sync)


def _bucket_choices(request: PlanRequest, plan: Plan) -> list[tuple[int, ...]]:
    if "bucket_bytes" in request.fixed:
        return [request.fixed["bucket_bytes"]]
    if plan.workers == 1 or trains_apart(plan.sync):  # no backward pass to hide behind
        return [DEFAULT_BUCKET_BYTES]
    workload = request.workloads[plan.workers]
    total = sum(p.num_bytes for p in bucket_gradients(workload, plan.sync))
    if total > DEFAULT_BUCKET_BYTES[0] and not is_worth_hiding(request.machine, workload, plan):
        return [(total,)]
    choices: list[tuple[int, ...]] = [DEFAULT_BUCKET_BYTES]
    if total > DEFAULT_BUCKET_BYTES[0]:
        # One bucket pays one latency, and is the best cut where nothing hides communication.
        choices.append((total,))
    try:
        searched = searched_bucket_bytes(request.machine, workload, plan)
    except MachineError:
        searched = None  # simulating the plan will say what is missing
    if searched is not None:
        choices.append(searched)
    # What was searched may be one of the other two.
    return list(dict.fromkeys(choices))
