"""A second trial of the plan that may win, where its first one contradicts what was predicted of it.

A trial takes a second or two, and a machine that others use may have been busy in just these. Of the
prediction and two trials at most one is far off then, and their median is believed. Without time for a second
one, the quieter half of the first is: other programs only ever make steps longer.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import msgspec

from ridgeline import units
from ridgeline.planner.labels import label
from ridgeline.planner.preparation import is_compiled
from ridgeline.planner.ranking import Candidate
from ridgeline.planner.trials.run_off import pooled, retrial_seconds, with_other
from ridgeline.planner.trials.trial_loop import Trial, attempted
from ridgeline.timeline import Timeline
from ridgeline.verdict import TOLERANCE, step_spread

CONTRADICTED: Mapping[str, float] = {"cpu": TOLERANCE, "cuda": math.inf}
"""A miss above this fraction is looked at again, by device: by more than this no verdict holds.

A GPU's steps keep their time from trial to trial; there it is the prediction that misses.
"""
BUSY_SPREAD = 0.1
"""Quartiles of a trial that lie so far apart, over its median, are those of a machine that others use.

Source: steps of a ResNet-18 by two workers on two cores; 3 to 6 % in runs, 15 % in a trial that took 193 ms a
step where 162 followed.
"""


def looked_at_again(
    candidates: list[Candidate],
    retrial: Trial,
    *,
    device: str,
    fixed: Mapping[str, object],
    steps: int | None = None,
    left_s: float = math.inf,
) -> tuple[list[Candidate], list[str]]:
    """The candidates with what a second trial says, where there was need and time for it, and what to note.

    Raises as `attempted`.

    Cost: One trial; most of what it compiles is compiled already.
    """
    doubted = contradicted(candidates, device=device, steps=steps)
    if doubted is None:
        return candidates, []
    if retrial_seconds(doubted) > left_s:
        return _quieter(candidates, doubted)
    tried, _ = attempted(doubted, candidates, retrial, fixed)
    predicted_s, first_s = doubted.timeline.step_ns / 1e9, doubted.step_s
    note = (
        f"{label(doubted.plan)} was tried again, since its trial took {units.seconds(first_s)} a step where "
        f"{units.seconds(predicted_s)} was predicted"
    )
    if tried.failure:  # what fails the second time is not to be trained with
        tried = msgspec.structs.replace(tried, measured=None)
    else:
        note += f": {units.seconds(tried.step_s)}"
        tried = msgspec.structs.replace(doubted, measured=_believed(doubted, tried))
    return with_other(candidates, doubted, tried), [note]


def _quieter(candidates: list[Candidate], doubted: Candidate) -> tuple[list[Candidate], list[str]]:
    """The candidates with the quieter half of a trial that was slower than predicted, if its steps differ."""
    trial = doubted.measured
    assert trial is not None, "a trial is doubted"
    # Of steps that exchange in turns some are longer whatever the machine does.
    exchanges_always = doubted.plan.sync.every == 1
    is_slower = trial.step_ns > doubted.timeline.step_ns
    if not (exchanges_always and is_slower and step_spread(trial) > BUSY_SPREAD):
        return candidates, []
    half = sorted(trial.steps_ns)[: (len(trial.steps_ns) + 1) // 2]
    quieter = msgspec.structs.replace(trial, steps_ns=tuple(half))
    tried = msgspec.structs.replace(doubted, measured=quieter)
    note = (
        f"of the trial of {label(doubted.plan)} the quieter half is believed, {units.seconds(tried.step_s)} "
        f"a step of {units.seconds(doubted.step_s)}: it was slower than predicted, and its steps differ by "
        f"{units.percent(step_spread(trial))}"
    )
    return with_other(candidates, doubted, tried), [note]


def contradicted(
    candidates: Sequence[Candidate], *, device: str, steps: int | None = None
) -> Candidate | None:
    """The plan that may win if its trial contradicts its prediction: the fastest, or one that was to be."""
    tried = [c for c in candidates if c.measured is not None and not c.failure]
    if not tried:
        return None
    fastest = min(tried, key=lambda c: c.cost_s(steps))
    # What compiles is not predicted that well: its trial says more than its prediction.
    may_win = [
        c
        for c in tried
        if not is_compiled(c.plan) and (c is fastest or _predicted_s(c) < _measured_s(fastest))
    ]
    found = min(may_win, key=_predicted_s, default=None)
    if found is None or abs(_predicted_s(found) / _measured_s(found) - 1.0) <= CONTRADICTED[device]:
        return None
    return found


def _predicted_s(candidate: Candidate) -> float:
    """Seconds a sample, as it was predicted."""
    return candidate.timeline.step_ns / 1e9 / max(candidate.samples, 1)


def _measured_s(candidate: Candidate) -> float:
    return candidate.sample_s


def _believed(first: Candidate, second: Candidate) -> Timeline:
    """The trial that took the median of the prediction and both trials; both, where they lie around it."""
    assert first.measured is not None, "a trial is doubted"
    assert second.measured is not None, "the second trial succeeded"
    trials = (first.measured, second.measured)
    median_ns = statistics.median(t.step_ns for t in (first.timeline, *trials))
    found = next((trial for trial in trials if trial.step_ns == median_ns), None)
    return found or pooled(trials, first)
