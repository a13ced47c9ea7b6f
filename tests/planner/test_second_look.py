"""A trial that contradicts its prediction is repeated, and one slow second of the machine decides nothing."""

import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planned_candidates import make_candidate
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution, Plan, Sync
from ridgeline.planner import Candidate
from ridgeline.planner.preparation import break_even_steps
from ridgeline.planner.trials.second_look import contradicted, looked_at_again
from ridgeline.timeline import Timeline
from ridgeline.verdict import TOLERANCE

TIMES = st.integers(1_000_000, 5_000_000)


def took(candidate: Candidate, step_ns: int) -> Timeline:
    return msgspec.structs.replace(candidate.timeline, steps_ns=(step_ns,) * 20)


def tried(execution: Execution, predicted_ns: int, measured_ns: int) -> Candidate:
    made = make_candidate(execution, predicted_ns * 1e-9)
    return msgspec.structs.replace(made, measured=took(made, measured_ns))


def looked(candidates: list[Candidate], second_ns: int, left_s: float = 1e9, device: str = "cpu"):
    """What a second trial of this time leaves of them, the plans that were tried again, and notes."""
    again: list[str] = []

    def retrial(plan: Plan) -> Timeline:
        again.append(plan.execution)
        return took(candidates[0], second_ns)

    found, notes = looked_at_again(candidates, retrial, device=device, fixed={}, left_s=left_s)
    return found, again, notes


@given(predicted=TIMES, first=TIMES, second=TIMES)
def test_the_median_of_the_prediction_and_both_trials_is_believed(
    predicted: int, first: int, second: int
) -> None:
    """Where the prediction lies between the trials, all their steps are."""
    candidates = [tried("eager", predicted, first)]
    (found,), again, notes = looked(candidates, second)
    is_doubted = abs(predicted / first - 1.0) > TOLERANCE
    assert (again, len(notes)) == ((["eager"], 1) if is_doubted else ([], 0))
    assert found.measured is not None
    if not is_doubted:
        assert found is candidates[0]
    elif statistics.median((predicted, first, second)) in (first, second):
        assert found.measured.step_ns == pytest.approx(
            statistics.median((predicted, first, second))
        )
    else:
        assert sorted(found.measured.steps_ns) == sorted([first] * 20 + [second] * 20)


def test_one_that_was_to_win_is_tried_again_and_one_that_could_not_is_not() -> None:
    """Its trial may have met the slow second, as the fastest one's may."""
    won, lost = tried("eager", 1_700_000, 1_720_000), tried("graph", 1_600_000, 2_000_000)
    found, again, notes = looked([won, lost], 1_590_000)
    assert again == ["graph"]
    assert [c.measured.step_ns for c in found] == [1_720_000, 1_590_000]
    assert "\n".join(notes) == (
        "1 worker, graph was tried again, since its trial took 2.00 ms a step where 1.60 ms was predicted: "
        "1.59 ms"
    )
    slower = tried("graph", 1_800_000, 2_500_000)
    assert contradicted([won, slower], device="cpu") is None
    assert contradicted([], device="cpu") is None
    compiled = tried("compiled", 1_000_000, 1_500_000)
    assert contradicted([won, compiled], device="cpu") is None, "its prediction says less"


def test_plans_for_a_batch_without_samples_are_compared_by_their_steps() -> None:
    """As a filter leaves one: a loop trains on it, and so does a choice."""
    empty = [
        msgspec.structs.replace(tried(mode, 1_000_000, measured_ns), samples=0)
        for mode, measured_ns in (("compiled", 1_500_000), ("eager", 2_000_000))
    ]
    assert contradicted(empty, device="cpu") is empty[1]
    assert break_even_steps(*empty) == break_even_steps(
        *(msgspec.structs.replace(one, samples=1) for one in empty)
    )


def test_without_time_or_need_nothing_is_tried_again() -> None:
    """A GPU keeps its speed from trial to trial."""
    candidates = [tried("eager", 1_000_000, 2_000_000)]
    for more in ({"left_s": 1e-3}, {"device": "cuda"}):
        found, again, notes = looked(candidates, 1_000_000, **more)
        assert (found, again, notes) == (candidates, [], [])


def test_without_time_the_quieter_half_of_a_busy_trial_is_believed() -> None:
    """Where it was slower than predicted and changed its speed; steps that exchange in turns do by themselves."""
    steady = tried("eager", 1_000_000, 1_300_000)
    busy = msgspec.structs.replace(steady, measured=msgspec.structs.replace(
        steady.measured, steps_ns=(1_500_000, 1_000_000, 1_400_000, 1_100_000, 1_600_000)
    ))  # fmt: skip
    (found,), again, notes = looked([busy], 1_000_000, left_s=0.0)
    assert (found.measured.step_ns, again) == (1_100_000, [])
    assert "\n".join(notes) == (
        "of the trial of 1 worker, eager the quieter half is believed, 1.10 ms a step of 1.40 ms: it was slower "
        "than predicted, and its steps differ by 28.6 %"
    )
    faster = msgspec.structs.replace(busy, timeline=took(busy, 2_000_000))
    in_turns = msgspec.structs.replace(busy, plan=Plan(sync=Sync(every=8)))
    for left in (steady, faster, in_turns):
        assert looked([left], 1_000_000, left_s=0.0) == ([left], [], [])


def test_what_fails_the_second_time_is_not_trained_with() -> None:
    """As in a run-off."""
    plain, captured = tried("eager", 2_000_000, 2_000_000), tried("graph", 1_000_000, 1_500_000)

    def fail(_: Plan) -> Timeline:
        raise CaptureError("wanted the same step, got another")

    found, _ = looked_at_again([plain, captured], fail, device="cpu", fixed={})
    assert found[0] is plain
    assert (found[1].measured, found[1].failure) == (None, "wanted the same step, got another")
