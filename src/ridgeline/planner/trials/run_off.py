"""A run-off between the fastest plan and the one behind it, where their trials lie too close.

Trials of two plans lie seconds to minutes apart, and a machine that others use changes its speed meanwhile.
Two plans that are tried in turns meet the same machine.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from ridgeline.execution import MODES
from ridgeline.planner.knobs import num_changes
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.trials.trial_loop import Trial, attempted
from ridgeline.planner.trials.trial_steps import trial_steps
from ridgeline.timeline import Timeline

CLOSE: Mapping[str, float] = {"cpu": 0.3, "cuda": 0.05}
"""A lead below this fraction is looked at again, by device.

Source: on a CPU measured, medians of one step on two shared cores, a minute apart, differed by up to 30 %. On
a GPU assumed: replayed steps on an H200 spread by 0.1 to 2 % (`docs/accuracy.md`).
"""
CLOSE_ISSUED = 0.3
"""The same between steps that a GPU's host issues. Source: on hosts of an H200, the same step minutes apart:
DeBERTa 22.6 and 29.8 ms, packed sequences 16.7 and 20.3, a mixture of experts 41.4 and 36.9."""
NUM_TRIALS = 4
"""Of a run-off: two of each plan."""
LONG_S = 15.0
"""Seconds of a run-off that is left out where predictions say what the trials say: with steps of a second it
takes most of a minute."""
AGREED = 0.03
"""So near to each other, the predicted and the measured ratio of two steps show that the machine kept its
speed. Source: predictions of eager steps on two cores, off by 1.7 % in the median (`docs/accuracy.md`)."""


def run_off(
    candidates: list[Candidate],
    retrial: Trial,
    *,
    device: str,
    fixed: Mapping[str, object],
    steps: int | None = None,
    left_s: float = math.inf,
) -> tuple[list[Candidate], list[str]]:
    """The candidates with what both took in turns, where there was need and time for it, and what to note.

    Raises as `attempted`.

    Cost: Two trials of each of the two plans; most of what they compile is compiled already.
    """
    pair = finalists(candidates, device=device, steps=steps)
    if pair is None or _seconds(pair) > left_s or _is_foretold(pair):
        return candidates, []
    fastest, rival = pair
    found: dict[int, list[Timeline]] = {id(candidate): [] for candidate in pair}
    for candidate in (rival, fastest, fastest, rival):  # a steady drift weighs on both alike
        tried, _ = attempted(candidate, candidates, retrial, fixed)
        if tried.failure:  # what fails the second time is not to be trained with
            return with_other(
                candidates, candidate, msgspec.structs.replace(tried, measured=None)
            ), []
        assert tried.measured is not None
        found[id(candidate)].append(tried.measured)
    for candidate in pair:
        measured = pooled(found[id(candidate)], candidate)
        both = msgspec.structs.replace(candidate, measured=measured)
        candidates = with_other(candidates, candidate, both)
    note = f"{label(fastest.plan)} and {label(rival.plan)} were tried again in turns, being close"
    return candidates, [note]


def finalists(
    candidates: Sequence[Candidate], *, device: str, steps: int | None = None
) -> tuple[Candidate, Candidate] | None:
    """The fastest plan and its rival, the fastest of those that might be faster; None if not close.

    Rivals are plainer plans that compile nothing; between steps that a GPU's host issues, all such plans.
    """
    tried = [c for c in candidates if c.measured is not None and not c.failure]
    if not tried:
        return None
    fastest = min(tried, key=lambda c: c.cost_s(steps))
    rivals = [c for c in tried if c is not fastest and _is_rival(c, fastest, device)]
    if not rivals:
        return None
    rival = min(rivals, key=lambda c: c.cost_s(steps))
    share = CLOSE_ISSUED if _are_issued(rival, fastest, device) else CLOSE[device]
    is_close = fastest.cost_s(steps) >= rival.cost_s(steps) * (1.0 - share)
    return (fastest, rival) if is_close else None


def _is_rival(candidate: Candidate, fastest: Candidate, device: str) -> bool:
    if _are_issued(candidate, fastest, device):
        return True
    is_plainer = num_changes(candidate.plan) < num_changes(fastest.plan)
    return is_plainer and not is_compiled(candidate.plan)


def _are_issued(one: Candidate, other: Candidate, device: str) -> bool:
    """Whether a GPU's host issues the steps of both, operator by operator or compiled."""
    modes = [MODES[candidate.plan.execution] for candidate in (one, other)]
    return device == "cuda" and not any(m.is_captured or m.is_one_program for m in modes)


def retrial_seconds(tried: Candidate) -> float:
    """Seconds that one more trial takes; a step that is one program is made again in each trial."""
    anew_s = tried.compile_s if MODES[tried.plan.execution].is_one_program else 0.0
    return anew_s + trial_steps(tried.plan, tried.step_s) * tried.step_s


def _seconds(pair: Sequence[Candidate]) -> float:
    return 2 * sum(map(retrial_seconds, pair))


def _is_foretold(pair: Sequence[Candidate]) -> bool:
    """Whether a long run-off would most likely repeat what the trials and the predictions agree on."""
    if _seconds(pair) < LONG_S or any(is_compiled(candidate.plan) for candidate in pair):
        return False
    fastest, rival = pair
    predicted = fastest.timeline.step_ns / rival.timeline.step_ns
    measured = fastest.step_s / rival.step_s
    return abs(predicted / measured - 1.0) <= AGREED


def pooled(timelines: Sequence[Timeline], candidate: Candidate) -> Timeline:
    """One timeline with the steps of several trials, and what the first trial spent on preparing."""
    last = timelines[-1]
    counters = dict(last.counters)
    if candidate.measured is not None and "compile_s" in candidate.measured.counters:
        # The second trial finds all in the compiler's cache, which a run that starts now would not.
        counters["compile_s"] = candidate.measured.counters["compile_s"]
    # Pooled, so that the median is over both turns and not of the quieter one.
    steps = tuple(step for timeline in timelines for step in timeline.steps_ns)
    return msgspec.structs.replace(last, steps_ns=steps, counters=counters)


def with_other(candidates: Sequence[Candidate], old: Candidate, new: Candidate) -> list[Candidate]:
    """The candidates, another one in the place of one of them."""
    return [new if c is old else c for c in candidates]
