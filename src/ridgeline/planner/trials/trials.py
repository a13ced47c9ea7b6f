"""Which plan to run for real next: each trial says something about its relatives, until none could still win.

Trials are chosen one by one. What was measured corrects what is expected of plans that differ little, and a
plan is worth a trial only while it could be faster than the best measured one by more than is in doubt. Plans
that compile nothing come first, since they cost seconds, but for those that what compiles will likely rule
out; then the compiler's own defaults, then variants.
"""

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from ridgeline import units
from ridgeline.execution import MODES
from ridgeline.plan import Plan
from ridgeline.planner.exchanges.held import is_due_beside
from ridgeline.planner.knobs import num_changes
from ridgeline.planner.preparation import is_compiled, is_compiled_plainly
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.trials.trial_steps import least_steps
from ridgeline.synchronisation import LEAST_GAIN

SAME_PLAN_MARGIN = 0.02
"""Plans alike but for their buckets are both tried only when predicted to differ by more than this."""
STEPS_PER_TRIAL = 15
MOST_TRIAL_SHARE = 0.25
"""Trials may take this share of a run whose number of steps is known."""

DOUBT = {
    "form": 0.25,
    "replay": 0.05,
    "replays_model": 0.05,
    "precision": 0.15,
    "memory_format": 0.15,
    "kernels": 0.10,
    "optimizer": 0.05,
    "random": 0.05,
    "workers": 0.3,
    "threads": 0.3,
    "accumulate": 0.10,
    "sync": 0.02,
    "exchange": 0.10,
    "feed": 0.02,
}
"""By what fraction a plan may be expected too slow when its nearest tried relative differs from it in this.

Source: assumed; how far the ratio of measured to predicted steps differed between such plans of eleven
networks on an H200.
"""
EXCHANGING = frozenset({"workers", "sync", "exchange"})
"""Of these, those that change what exchanges take."""
COMPILED_ON_GPU = 0.5
"""`form` on a GPU, where what compiling gains is worth minutes: 0.9 to 3.5 times in those networks."""
BOTH_COMPILED = 0.15
"""`form` between steps that are compiled whole, by region or with their optimizer: one compiler makes the
kernels of all, and what they fuse more or less is predicted. Source: assumed."""
BY_REGION = 0.05
"""`form` between a step compiled whole and by region, which fuses less. Source: Whisper and a style-transfer
network on an H100, by region 7 and 10 % slower."""
ISSUED_ON_GPU = 0.35
"""`precision` of steps that a GPU's host issues: what that takes drifts by a quarter, and in one precision
the host may be the limit, in the other the device. Source: a mixture of experts on two hosts of an H200."""
FAR_BEHIND = 1.4
"""Once the compiler's defaults were tried, a compiled plan that is expected to take so many times as long as
another waits for that one: more than is in doubt between two such plans, in another form and precision."""
SMALL_STEP_S = 4e-3
"""On a GPU, combined kernels are tried where a compiled step takes less: others did not gain from them, and
BERT-base lost a third."""
COMPILE_MAY_TAKE = 0.4
"""Share of what is expected that compiling takes at the least, where this choice has compiled nothing yet.

Source: expected of `simulator.compile_time`, on the host of an H200 with torch 2.11: BEiT-base 64 s and 24 s
taken, a Perceiver 56 s and 30 s, DLA 33 s and 35 s.
"""


class Room(NamedTuple):
    """What trials may still take.

    Attributes:
        tries: How many.
        compile_s: Seconds of expected compiling.
        seconds: Seconds in all.
        overhead_s: Seconds that a trial takes besides its steps and their preparation.
        compile_share: Of the expected compiling, with which a trial is worth beginning; it is stopped in
            time.
        plain_s: Seconds in all, if more, for what a user would write, see `is_compiled_plainly`.
        brief_s: Seconds in all, if more, for what compiles nothing.
    """

    tries: int
    compile_s: float = math.inf
    seconds: float = math.inf
    overhead_s: float = 0.0
    compile_share: float = 1.0
    plain_s: float = 0.0
    brief_s: float = 0.0


def next_trial(
    candidates: Sequence[Candidate], room: Room, *, device: str, steps: int | None = None
) -> int | None:
    """Index of the candidate to try next; None when none could win, or there is no room."""
    if room.tries < 1:
        return None
    open_ = [
        index
        for index in _representatives(candidates)
        if _is_open(candidates[index])
        and not has_failed_alike(candidates[index], candidates)
        and is_due_beside(candidates[index], candidates)
        and could_win(candidates[index], candidates, device=device, steps=steps)
        and _fits(candidates[index], room)
    ]
    due = _due(open_, candidates, room, device=device, steps=steps)
    tried = [c.cost_s(steps) for c in candidates if c.measured is not None]
    fastest = min(tried, default=math.inf)
    far_s = math.inf
    # Not before: what those take says how long another program may take.
    if any(MODES[c.plan.execution].form == "compiled" and not _is_open(c) for c in candidates):
        compiled = [candidates[i].cost_s(steps) for i in due if is_compiled(candidates[i].plan)]
        far_s = FAR_BEHIND * min(compiled, default=math.inf)
    return min(due, key=lambda i: _turn(candidates[i], steps, fastest, far_s, device), default=None)


def _due(
    open_: Sequence[int],
    candidates: Sequence[Candidate],
    room: Room,
    *,
    device: str,
    steps: int | None,
) -> list[int]:
    """Those of the open candidates that are to be tried before the others.

    Once something runs, a plan that compiles nothing waits for one that compiles where that is expected to be
    faster than the plan may be at best: most likely its trial is not needed then. What runs first is then a
    step as written, which needs no capture; so it is where a trial failed and nothing was measured yet.
    """
    tried = [c for c in candidates if c.measured is not None]
    as_written = [i for i in open_ if _runs_as_written(candidates[i].plan)]
    # Where something failed before: it takes a second, and corrects what is expected of all others.
    if not tried and as_written and any(c.failure for c in candidates):
        return as_written
    certain = room._replace(compile_share=1.0)
    compiled = [
        candidates[i].cost_s(steps)
        for i in open_
        if is_compiled(candidates[i].plan) and _fits(candidates[i], certain)
    ]
    if not compiled:
        return list(open_)
    if not tried:
        plain = [i for i in open_ if not is_compiled(candidates[i].plan)]
        is_slower = all(candidates[i].cost_s(steps) > min(compiled) for i in plain)
        # Of limited seconds compiling may take all, and a capture is then the best there is.
        waits = is_slower and math.isinf(room.seconds)
        return as_written if waits and as_written else list(open_)
    return [
        i
        for i in open_
        if is_compiled(candidates[i].plan)
        or _at_best_s(candidates[i], tried, device, steps) <= min(compiled)
    ]


def _runs_as_written(plan: Plan) -> bool:
    """Whether a step runs operator by operator, with no part of it captured."""
    mode = MODES[plan.execution]
    return not (mode.is_compiled or mode.is_captured or mode.replays_model)


def could_win(
    candidate: Candidate, candidates: Sequence[Candidate], *, device: str, steps: int | None = None
) -> bool:
    """Whether a candidate that was not tried may be faster than all that were, for all that is known.

    Or, where the fastest is of workers that train alone for longer, fast enough to be taken before it.
    """
    tried = [c for c in candidates if c.measured is not None]
    if not tried:
        return True
    if candidate.plan.kernels == "combined" and not _has_small_steps(candidate, tried):
        return False
    if device == "cuda" and any(_only_issues(candidate.plan, c.plan) for c in tried):
        return False
    fastest = min(tried, key=lambda c: c.cost_s(steps))
    # A shorter interval changes the maths less, so it is taken even where it is a little slower.
    is_milder = candidate.plan.sync.every < fastest.plan.sync.every
    enough = 1.0 / (1.0 - LEAST_GAIN) if is_milder else 1.0 - SAME_PLAN_MARGIN
    return _at_best_s(candidate, tried, device, steps) < fastest.cost_s(steps) * enough


def _at_best_s(
    candidate: Candidate, tried: Sequence[Candidate], device: str, steps: int | None
) -> float:
    """What a candidate may cost at best; exchanges are in doubt where its tried relative has others."""
    # The relative that says most: of others the doubt would be larger, and with it the number of trials.
    nearest = min(tried, key=lambda c: _doubt(candidate.plan, c.plan, device))
    kept = 1.0 - _doubt(candidate.plan, nearest.plan, device)
    different = differences(candidate.plan, nearest.plan) & EXCHANGING
    exchanging = math.prod(1.0 - DOUBT[name] for name in different)
    return candidate.cost_s(steps) * max(kept, candidate.least_share(kept, exchanging))


def has_failed_alike(candidate: Candidate, candidates: Sequence[Candidate]) -> bool:
    """Whether the same mode failed in this precision, or in two of them: what cannot be captured stays so.

    Neither is a precision tried in which the step failed operator by operator: some operator has none. What
    failed while it had to draw the eager step's random numbers may succeed with its own.
    """
    plan = candidate.plan
    failed = [c.plan for c in candidates if c.failure and c.plan.workers == plan.workers]
    alike = [
        p.precision for p in failed if (p.execution, p.random) == (plan.execution, plan.random)
    ]
    plainly = [p.precision for p in failed if p.execution == "eager"]
    return plan.precision in (*alike, *plainly) or len(set(alike)) > 1


def num_tries(tries: int, steps: int | None) -> int:
    """Trials that a run of known length has room for."""
    if steps is None:
        return tries
    return min(tries, int(MOST_TRIAL_SHARE * steps / STEPS_PER_TRIAL))


def left_untried(
    candidates: Sequence[Candidate], room: Room, *, device: str, steps: int | None = None
) -> list[str]:
    """Says which modes were not tried though they could win, because compiling them takes too long."""
    # Failed ones count as tried: they say themselves why they are out.
    tried = {c.plan.execution for c in candidates if not _is_open(c)}
    dear = {
        c.plan.execution: c.compile_s
        for c in reversed(candidates)
        if is_compiled(c.plan)
        and c.plan.execution not in tried
        and not _fits(c, room)
        and could_win(c, candidates, device=device, steps=steps)
    }
    left_s = min(room.compile_s, room.seconds)
    limit = f"trials may spend {units.seconds(max(0.0, left_s))} on compiling"
    if not room.compile_s and device == "cpu":
        limit = "trials compile nothing on a CPU while the number of steps is unknown"
    return [
        f"{execution} was not tried: compiling it takes about {units.seconds(seconds)}, and {limit}"
        for execution, seconds in reversed(dear.items())
    ]


def differences(one: Plan, other: Plan) -> frozenset[str]:
    """The features in which two plans differ, as named in `DOUBT`."""
    modes = MODES[one.execution], MODES[other.execution]
    found = {
        name
        for name in DOUBT
        if name not in ("form", "replay", "replays_model", "exchange")
        and getattr(one, name) != getattr(other, name)
    }
    if modes[0].form != modes[1].form:
        found.add("form")
    if modes[0].is_captured != modes[1].is_captured:
        found.add("replay")
    if modes[0].replays_model != modes[1].replays_model:
        found.add("replays_model")
    if not _exchange_alike(one, other):
        found.add("exchange")
    return frozenset(found)


def _exchange_alike(one: Plan, other: Plan) -> bool:
    """Whether gradients are exchanged in the same way, however they are cut."""
    cut = msgspec.structs.replace(one.sync, bucket_bytes=other.sync.bucket_bytes)
    return cut == other.sync


def _doubt(one: Plan, other: Plan, device: str) -> float:
    """By how much less than expected of it a plan may take, where the other was tried."""
    kept = 1.0
    different = differences(one, other)
    if device == "cuda" and _is_issued_replay(one, other):
        # Issuing adds to what a replay takes and cannot be faster, so neither is in doubt.
        different -= {"replay", "optimizer"}
    for name in different:
        # Multiplied, since differences in several features may each save their share.
        kept *= 1.0 - _doubt_of(name, one, other, device)
    return 1.0 - kept


def _doubt_of(name: str, one: Plan, other: Plan, device: str) -> float:
    """The part of one feature in which they differ."""
    if name == "form" and is_compiled(one) and is_compiled(other):
        forms = {MODES[plan.execution].form for plan in (one, other)}
        return BY_REGION if forms == {"compiled", "regional"} else BOTH_COMPILED
    if name == "form" and device == "cuda":
        return COMPILED_ON_GPU
    if name == "precision" and device == "cuda" and not _has_replay(one, other):
        return ISSUED_ON_GPU
    return DOUBT[name]


def _is_issued_replay(one: Plan, other: Plan) -> bool:
    """Whether the host would issue what a graph replayed under the other plan, and so only adds to it."""
    modes = MODES[one.execution], MODES[other.execution]
    return modes[1].is_captured and not (modes[0].is_captured or modes[0].is_one_program)


def _only_issues(plan: Plan, other: Plan) -> bool:
    """Whether a plan has the host issue the very kernels that the other has replayed."""
    return differences(plan, other) <= {"replay", "optimizer"} and _is_issued_replay(plan, other)


def _has_replay(*plans: Plan) -> bool:
    """Whether a GPU replays the step, or its model, under one of some plans."""
    modes = [MODES[plan.execution] for plan in plans]
    return any(mode.is_captured or mode.is_one_program for mode in modes)


def _is_open(candidate: Candidate) -> bool:
    return candidate.measured is None and not candidate.failure


def _has_small_steps(candidate: Candidate, tried: Sequence[Candidate]) -> bool:
    """Whether the same step with the compiler's own kernels was tried and is short."""
    plain = msgspec.structs.replace(candidate.plan, kernels="default", choices=())
    return any(c.plan.settings == plain and c.step_s < SMALL_STEP_S for c in tried)


def _fits(candidate: Candidate, room: Room) -> bool:
    if is_compiled(candidate.plan) and candidate.compile_s > room.compile_s:
        return False
    compile_s = room.compile_share * candidate.compile_s
    seconds = compile_s + least_steps(candidate.plan) * candidate.step_s
    plain_s = room.plain_s if is_compiled_plainly(candidate.plan) else 0.0
    brief_s = 0.0 if is_compiled(candidate.plan) else room.brief_s
    return room.overhead_s + seconds <= max(room.seconds, plain_s, brief_s)


def _turn(
    candidate: Candidate, steps: int | None, fastest: float, far_s: float, device: str
) -> tuple[bool, bool, bool, bool, bool, bool, bool, float, int]:
    """What compiles nothing first; then the compiler's defaults, then one program, then variants.

    Of what compiles, plans that are expected to win come before those that would only if what is expected of
    them is wrong, or take `far_s` or longer: a program takes minutes, and trials may not have them twice.
    Whole comes before by region, as `torch.compile` has it: what is chosen was timed against that.
    Of what compiles, the form that a GPU replays comes before the same program called by the host: it has the
    same kernels, and what the host adds only hides what they take. Random numbers of their own, where they
    are allowed, are what `torch.compile` draws: the faster of both ways to draw comes first.
    """
    plan = candidate.plan
    return (
        is_compiled(plan),
        is_compiled(plan) and candidate.cost_s(steps) >= fastest,
        is_compiled(plan) and candidate.cost_s(steps) >= far_s,
        plan.kernels == "combined",
        MODES[plan.execution].form == "regional",
        MODES[plan.execution].is_one_program and plan.workers == 1,
        is_compiled(plan) and device == "cuda" and not MODES[plan.execution].is_captured,
        candidate.cost_s(steps),
        num_changes(plan),
    )


def _representatives(candidates: Sequence[Candidate]) -> list[int]:
    """The simplest of each kind among those of about equal time; buckets make no kinds, nor do callers."""
    kinds: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates):
        kind = next((k for k in kinds if _is_same_kind(candidates[k], candidate)), index)
        kinds.setdefault(kind, []).append(index)
    picked: list[int] = []
    for members in kinds.values():
        done = [i for i in members if not _is_open(candidates[i])]
        for index in sorted(members, key=lambda i: candidates[i].sample_s):
            alike = [i for i in members if _is_equal(candidates, i, index)]
            if not any(i in done for i in alike):
                done.append(_simplest(alike, candidates))
                picked.append(done[-1])
    return picked


def _is_same_kind(mine: Candidate, other: Candidate) -> bool:
    execution = mine.plan.execution
    if all(MODES[c.plan.execution].is_one_program for c in (mine, other)):
        execution = other.plan.execution
    alike = msgspec.structs.replace(mine.plan, sync=other.plan.sync, execution=execution)
    return alike == other.plan and _exchange_alike(mine.plan, other.plan)


def _is_equal(candidates: Sequence[Candidate], mine: int, other: int) -> bool:
    slower, faster = sorted((candidates[mine].sample_s, candidates[other].sample_s), reverse=True)
    return slower <= faster * (1.0 + SAME_PLAN_MARGIN)


def _simplest(indices: Collection[int], candidates: Sequence[Candidate]) -> int:
    return min(indices, key=lambda i: (num_changes(candidates[i].plan), candidates[i].sample_s))
