"""Every known way to exchange gradients, or parameters: what it would send and cost, and why it is not taken.

Sending less pays where the link is slow and the codec is not: in 6 of some 200 set-ups of data centres. So
each way is held against the machine's numbers, also those that are not allowed or do not run.

Source of the count: Agarwal et al., "On the utility of gradient compression in distributed training systems",
MLSys 2022.
"""

from collections.abc import Collection, Mapping

import msgspec

from ridgeline.codec import Value
from ridgeline.errors import PlanError
from ridgeline.machine import Machine
from ridgeline.plan import Plan, Sync
from ridgeline.planner.exchanges.exchanges import APART_PERMISSION, PERMISSION, UNKNOWN_LOSS
from ridgeline.planner.exchanges.held import FINE_BYTES, fastest_held, why_not_held
from ridgeline.planner.exchanges.rhythms import known_rhythms
from ridgeline.simulator.exchange.synchronising import sent_bytes
from ridgeline.simulator.model import rows_beside
from ridgeline.simulator.step import simulate
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    DEFAULT_ALGORITHM,
    HELD,
    LEAST_GAIN,
    UNCOMPRESSED,
    check_sync,
    holds,
    is_exact,
    is_exchange_frame,
    rows_bytes,
    shards_update,
)
from ridgeline.workload import Workload

NOTHING_EXCHANGED = "a single worker exchanges nothing"


class ExchangeRow(Value, frozen=True, kw_only=True):
    """One way to exchange gradients, or parameters, as it would do in a plan.

    Of exchanges now and then `sent_bytes` (that a worker hands to the collectives) and `exchange_s` (of all
    buckets; of exchanges now and then, what is not hidden) are a step's share. `step_s` is None where it
    cannot be predicted. `verdict` says whether the planner takes it, and why not.
    """

    algorithm: str
    compression: str
    every: int = 1
    options: dict[str, bool | int | float | str] = {}
    sent_bytes: int | None = None
    exchange_s: float | None = None
    step_s: float | None = None
    is_exact: bool = True
    verdict: str = ""


def exchange_table(
    machine: Machine,
    workloads: Mapping[int, Workload],
    plan: Plan,
    *,
    allow: Collection[str] = (),
    error: float = 0.0,
) -> tuple[ExchangeRow, ...]:
    """The rows of all words: each algorithm without compression, each compression by the default algorithm.

    Then the step that holds buckets, as many as are predicted to be fastest, and the rhythms of a search.

    The plan is of several workers; its other knobs stay as they are. Below `error`, a fraction of a step, a
    prediction decides nothing.

    Raises:
        PlanError: the plan is of a worker alone.
    """
    if plan.workers == 1:
        raise PlanError(
            f"wanted a plan of several workers, got workers=1 in the plan: {NOTHING_EXCHANGED}; give "
            "--devices of 2 or more"
        )
    workload = workloads[plan.workers]
    ways = [Sync(algorithm=name, bucket_bytes=plan.sync.bucket_bytes) for name in ALGORITHMS]
    ways += [
        Sync(compression=name, bucket_bytes=plan.sync.bucket_bytes)
        for name in COMPRESSIONS
        if name != UNCOMPRESSED
    ]
    ways += [_held_way(machine, workload, plan), *known_rhythms(workload)]
    rows = [_row(machine, workload, plan, sync) for sync in ways]
    # Rows of the algorithms come first and in their order, so this is the default without compression.
    plainest = rows[list(ALGORITHMS).index(DEFAULT_ALGORITHM)]
    return tuple(_judged(row, plainest, plan, allow, error) for row in rows)


def _held_way(machine: Machine, workload: Workload, plan: Plan) -> Sync:
    """The exchange of a step that holds buckets: as in the plan, else as is predicted to be fastest."""
    if holds(plan.sync):
        return plan.sync
    plain = Sync(bucket_bytes=plan.sync.bucket_bytes)
    eager = msgspec.structs.replace(plan, execution="eager", sync=plain)
    cuts = (plain.bucket_bytes, FINE_BYTES)
    found = None
    # Asked of the eager plan, the only execution that holds buckets.
    if not why_not_held(workload, eager):
        found = fastest_held(machine, workload, eager, cuts)
    return msgspec.structs.replace(plain, options={HELD.name: 1}) if found is None else found.sync


def _row(machine: Machine, workload: Workload, plan: Plan, sync: Sync) -> ExchangeRow:
    row = ExchangeRow(
        algorithm=sync.algorithm,
        compression=sync.compression,
        every=sync.every,
        options=sync.options,
        is_exact=is_exact(sync),
    )
    there = msgspec.structs.replace(plan, sync=sync)
    refused_held = why_not_held(workload, there) if holds(sync) else ""
    if refused_held:
        return msgspec.structs.replace(row, verdict=f"not compared: {refused_held}")
    # Refused ways stay in the table: the reason is what a reader looks for there.
    try:
        check_sync(sync, plan.workers, workload.device)
        timeline = simulate(machine, workload, there, details=False)
    except PlanError as refused:
        return msgspec.structs.replace(row, verdict=_reason(refused, sync))
    # What is held ends in the next step, which shows no more of it; a step that waits shows all.
    whole = timeline
    if holds(sync):
        waiting = msgspec.structs.replace(sync, options={})
        plan_ = msgspec.structs.replace(there, sync=waiting)
        whole = simulate(machine, workload, plan_, details=False)
    exchange_ns = sum(span.duration_ns for span in whole.frames if is_exchange_frame(span.name))
    rows = rows_bytes([one.to_send for one in rows_beside(workload, there)])
    return msgspec.structs.replace(
        row,
        sent_bytes=round((sum(sent_bytes(workload, there)) + rows) / sync.every),
        exchange_s=exchange_ns * 1e-9,
        step_s=timeline.step_ns * 1e-9,
    )


def _reason(refused: PlanError, sync: Sync) -> str:
    """Why a way cannot be taken, in a few words where these are enough."""
    algorithm, compression = ALGORITHMS[sync.algorithm], COMPRESSIONS[sync.compression]
    if not (algorithm.runs and compression.runs):
        return "this release does not run it"
    return str(refused)


def _judged(
    row: ExchangeRow, plainest: ExchangeRow, plan: Plan, allow: Collection[str], error: float
) -> ExchangeRow:
    if row.step_s is None or plainest.step_s is None:
        return row
    words = []
    is_chosen = _is_of(row, plan.sync)
    if is_chosen:
        words.append("chosen")
    gain = 1.0 - row.step_s / plainest.step_s
    if row is plainest:
        words.append("the default")
    # Before the plain comparison: such a gain is real, and taken only where a longer interval gains enough.
    elif row.every > 1 and not is_chosen and max(error, 0.0) < gain < LEAST_GAIN:
        words.append(
            f"gains {gain:.1%}, less than the {LEAST_GAIN:.0%} that training alone must gain"
        )
    elif gain > max(error, 0.0):
        words.append(f"{gain:.1%} faster than the default")
    elif gain < 0.0:
        words.append(f"loses: {-gain:.1%} slower than the default")
    else:
        words.append(f"gains {gain:.1%}, which is within the uncertainty of {error:.1%}")
    if shards_update(Sync(algorithm=row.algorithm)):
        words.append(f"a worker keeps 1/{plan.workers} of the optimizer's state")
    if HELD.name in row.options:
        words.append("the next forward pass waits for the parameters that it reads; trials decide")
    if remark := ALGORITHMS[row.algorithm].remark:
        words.append(remark)
    if not row.is_exact:
        lacking = [wanted for wanted in _permissions(row) if wanted not in allow]
        named = lacking[0] if len(lacking) == 1 else tuple(lacking)
        words.append(f"needs allow={named!r}: {UNKNOWN_LOSS}" if lacking else UNKNOWN_LOSS)
    return msgspec.structs.replace(row, verdict="; ".join(words))


def _permissions(row: ExchangeRow) -> list[str]:
    """What must be allowed for a way that is not exact to be taken."""
    is_apart, is_encoded = row.every > 1, row.compression != UNCOMPRESSED
    apart = [APART_PERMISSION] if is_apart else []
    return apart + ([PERMISSION] if is_encoded or not is_apart else [])


def _is_of(row: ExchangeRow, sync: Sync) -> bool:
    """Whether a row is that of a plan's way, whatever options its algorithm and its compression have."""
    way = (row.algorithm, row.compression, row.every)
    is_alike = way == (sync.algorithm, sync.compression, sync.every)
    is_held = row.options.get(HELD.name) == sync.options.get(HELD.name)
    # Options of an exchange in every step only tune it; those of a rhythm make another algorithm of it.
    return is_alike and is_held and (row.every == 1 or row.options == sync.options)
