"""What people are told of trials: before each, while it runs, and after it."""

import pytest

from ridgeline.decision.heartbeat import EVERY_S, Heartbeat
from ridgeline.decision.told_trials import ToldTrials, trial_words
from ridgeline.errors import CaptureError, OutOfTimeError
from ridgeline.plan import Plan
from ridgeline.timeline import Timeline
from strategies import make_timeline

SPANS = [("forward", "compute", 0, 1_500_000)]
EAGER, COMPILED = Plan(threads=2), Plan(threads=2, execution="compiled")


class Clock:
    """Stands where the test puts it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def expected_s(plan: Plan) -> float:
    return 8.6 * (plan.execution != "eager")


def test_trials_are_told_before_and_after() -> None:
    """Compiling with its seconds, once for each form; a step's time stands alone where nothing was prepared."""
    lines: list[str] = []

    def run(plan: Plan) -> Timeline:
        counters = {"compile_s": 12.5} if plan.execution != "eager" else {}
        return make_timeline(SPANS, counters=counters)

    trial = ToldTrials(run, expected_s, Heartbeat(lines.append))
    for plan in (EAGER, COMPILED, COMPILED):
        trial(plan)
    assert lines == [
        "trying 1 worker x 2 threads, eager",
        "  1.50 ms a step",
        "trying 1 worker x 2 threads, compiled, compiling it first for about 8.60 s",
        "  1.50 ms a step, after 12.5 s of preparing it",
        "trying 1 worker x 2 threads, compiled",
        "  1.50 ms a step, after 12.5 s of preparing it",
    ]


def test_what_the_machine_drifted_is_told() -> None:
    """The later half of the steps took a tenth more than the earlier one."""
    drifted = make_timeline(SPANS, steps_ns=(*(1_000_000,) * 8, *(1_100_000,) * 8))
    assert trial_words(drifted) == "1.00 ms a step, drift +10.0 %"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (CaptureError("no graph holds it\nat line 3"), "  failed: no graph holds it"),
        (OutOfTimeError("time is up"), "  stopped: time is up"),
        (AssertionError(), "  failed: AssertionError"),
    ],
)
def test_a_trial_that_fails_is_told_in_one_line(error: Exception, told: str) -> None:
    """With the first line of the reason, and the seconds that were left before it."""
    lines: list[str] = []

    def run(plan: Plan) -> Timeline:
        raise error

    trial = ToldTrials(run, expected_s, Heartbeat(lines.append), left=lambda: 30.0)
    with pytest.raises(type(error)):
        trial(EAGER)
    assert lines == ["trying 1 worker x 2 threads, eager (30.0 s left)", told]


def test_a_long_trial_gives_signs_of_life() -> None:
    """What is under way, for how long, and how long compiling may take; what was told puts it off."""
    clock, lines = Clock(), list[str]()
    heartbeat = Heartbeat(lines.append, clock=clock)

    def run(plan: Plan) -> Timeline:
        clock.now_s += EVERY_S - 1.0
        heartbeat.beat()
        clock.now_s += 1.0
        heartbeat.beat()
        return make_timeline(SPANS)

    trial = ToldTrials(run, expected_s, heartbeat)
    clock.now_s = 100.0
    trial(EAGER)
    trial(COMPILED)
    assert [line for line in lines if line.startswith("  still")] == [
        "  still trying it (10.0 s so far)",
        "  still compiling and trying it (10.0 s so far, longer than the 8.60 s expected)",
    ]
