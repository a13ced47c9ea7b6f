"""What trials say about plans that were not tried: a step's and its preparation's seconds, corrected.

The model misses plans of one network on one machine in like manner: by what it does not know of the machine's
state or the network's kernels. So the prediction of a plan is multiplied by what its nearest tried relative
took over its own prediction.
"""

from collections.abc import Sequence

import msgspec

from ridgeline.execution import MODES, is_compiled_in_parts
from ridgeline.plan import Plan
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.trials.trials import DOUBT, differences

HOST = 1.0
"""Distance between what the host issues and what is replayed: they are limited by different things."""
SHARED_S = 1.0
"""Seconds to prepare a plan whose compiled program another plan has: the capture and the comparison."""
AGAIN = 0.65
"""Share of its seconds that compiling takes once the same step was compiled in another way.

Source: measured; 0.4 to 0.75 for ResNet-50, VGG-16, ConvNeXt-T, BERT-base and GPT-2 on the host of an H200,
where kernels that do not change come from the compiler's cache.
"""
SHARING = frozenset({"workers", "threads"})
"""How a machine is shared: what a trial measured with one number of workers says little about another."""
SAME_PROGRAM = ("form", "replays_model", "precision", "memory_format", "kernels", "random")


def corrected(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates; those that were not tried know what is expected of them after the trials."""
    tried = [c for c in candidates if c.measured is not None and c.timeline.step_ns]
    return [c if c.measured is not None else _corrected(c, tried) for c in candidates]


def _corrected(candidate: Candidate, tried: Sequence[Candidate]) -> Candidate:
    if not tried:
        return candidate
    nearest = min(tried, key=lambda c: _distance(candidate, c))
    expected_s, told_s = _predicted(candidate, nearest)
    ratio = nearest.step_s / told_s
    if candidate.plan.sync.every != nearest.plan.sync.every:
        ratio = _ratio_alone(nearest)
    different = differences(candidate.plan, nearest.plan)
    if different & SHARING:
        ratio = 1.0
    if "replay" in different and MODES[candidate.plan.execution].is_captured:
        ratio = min(ratio, 1.0)  # what a slow host adds is not in a replay
    return msgspec.structs.replace(
        candidate, corrected_s=expected_s * ratio, kin_compile_s=_preparing_s(candidate, tried)
    )


def _ratio_alone(tried: Candidate) -> float:
    """What a step took over its prediction, without waits: plans that exchange in other steps have others."""
    assert tried.measured is not None
    measured, predicted = (
        timeline.step_ns - timeline.total_ns("wait")
        for timeline in (tried.measured, tried.timeline)
    )
    return measured / predicted if measured > 0 and predicted > 0 else 1.0


def _predicted(candidate: Candidate, other: Candidate) -> tuple[float, float]:
    """Seconds that are predicted of both: of the first from what the compiler made, where that is known.

    What was assumed wrongly of the other's kernels was assumed of the first's as well, unless they were read.
    """
    told_s = other.timeline.step_ns * 1e-9
    if candidate.reading is None:
        return candidate.timeline.step_ns * 1e-9, told_s
    if other.reading is not None and other.reading.step_s:
        told_s = other.reading.step_s
    return candidate.reading.step_s, told_s


def _distance(candidate: Candidate, other: Candidate) -> tuple[float, float]:
    different = differences(candidate.plan, other.plan)
    doubt = sum(DOUBT[name] for name in different) + (HOST if "replay" in different else 0.0)
    return doubt, abs(other.timeline.step_ns - candidate.timeline.step_ns)


def _preparing_s(candidate: Candidate, tried: Sequence[Candidate]) -> float | None:
    """Expected seconds of preparing, from plans that were prepared; None where there are none."""
    prepared = [c for c in tried if c.measured is not None and "compile_s" in c.measured.counters]
    expected_s = candidate.timeline.counters.get("compile_s", 0.0)
    for other in prepared:
        different = differences(candidate.plan, other.plan)
        if different <= {"sync", "exchange", "feed"}:
            return other.compile_s
        if is_compiled(candidate.plan) and _share_program(candidate.plan, other.plan, different):
            return min(SHARED_S, other.compile_s)
    ratios = [
        other.compile_s / other.timeline.counters["compile_s"]
        for other in prepared
        if is_compiled(other.plan) and other.timeline.counters.get("compile_s")
    ]
    if not ratios or not expected_s:
        return None
    # The least would be of a program that the compiler had made before, for another plan.
    return AGAIN * expected_s * max(ratios)


def _share_program(one: Plan, other: Plan, different: frozenset[str]) -> bool:
    """Whether what the compiler made for one plan is what the other runs, cut at the same places."""
    if not different.isdisjoint((*SAME_PROGRAM, "workers")):
        return False
    return _bounds(one) == _bounds(other)


def _bounds(plan: Plan) -> tuple[int, ...]:
    """The limits of the buckets by which a plan's program is cut in parts; none where it is one."""
    # Only a GPU is offered modes that are replayed, so that of the others the device makes no difference.
    return plan.sync.bucket_bytes if is_compiled_in_parts(plan, "cuda") else ()
