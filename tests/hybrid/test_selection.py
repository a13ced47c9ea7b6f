"""Which mode is kept, as laws over measured times; and how the report says so."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.callables.calls.report import HybridReport, ModeRow
from ridgeline.callables.calls.selection import (
    ModeTiming,
    break_even_calls,
    decide,
    why_not_worth,
)
from ridgeline.errors import PlanError
from ridgeline.plan import Execution

MODES: tuple[Execution, ...] = ("eager", "graph", "script", "compiled", "packaged")


@st.composite
def measured(draw: st.DrawFn) -> list[ModeTiming]:
    number = draw(st.integers(1, len(MODES)))
    made = []
    for mode in MODES[:number]:
        median = draw(st.floats(1e-6, 1e-2))
        below, above = draw(st.floats(0, 0.5)), draw(st.floats(0, 2))
        made.append(ModeTiming(mode, median, median * (1 - below), median * (1 + above)))
    return made


@given(measured())
def test_never_slower_than_the_program_as_written(times: list[ModeTiming]) -> None:
    """A call in the chosen mode never takes longer than in the first, whatever the spreads."""
    chosen = next(one for one in times if one.mode == decide(times).mode)
    assert chosen.call_s <= times[0].call_s


@given(measured())
def test_without_spread_the_cheapest_wins(times: list[ModeTiming]) -> None:
    """With exact times the decision is the minimum of the call."""
    exact = [ModeTiming(o.mode, o.call_s, o.call_s, o.call_s) for o in times]
    chosen = next(one for one in exact if one.mode == decide(exact).mode)
    assert chosen.call_s == min(one.call_s for one in exact)


@given(measured(), st.floats(0.01, 100))
def test_the_unit_of_time_does_not_matter(times: list[ModeTiming], factor: float) -> None:
    """All times scaled alike, on another machine, lead to the same mode (away from ties by rounding)."""
    power = 2.0 ** round(factor)  # exact, so that rounding breaks no tie
    scaled = [
        ModeTiming(o.mode, o.call_s * power, o.low_s * power, o.high_s * power) for o in times
    ]
    assert decide(scaled).mode == decide(times).mode


@given(measured())
def test_a_slower_mode_changes_nothing(times: list[ModeTiming]) -> None:
    """Measuring one more mode that is slower than all others leaves the decision as it is."""
    slow = max(one.high_s for one in times) * 2
    more = [*times, ModeTiming("regional", slow, slow, slow)]
    assert decide(more).mode == decide(times).mode


def test_a_gain_within_the_spread_is_not_claimed() -> None:
    """Eager stays, and the reason says that the other was faster by less than the spread."""
    times = [
        ModeTiming("eager", 1.0e-3, 0.8e-3, 1.2e-3),
        ModeTiming("compiled", 0.9e-3, 0.7e-3, 1.1e-3),
    ]
    assert decide(times) == (
        "eager",
        (
            "compiled (900 us for a call) is faster than eager (1.00 ms) by less than the spread of the "
            "measurement: the simpler is kept"
        ),
    )


def test_the_fastest_says_by_how_much() -> None:
    """Its time beside that of the program as written; and after how many calls compiling is earned back."""
    times = [ModeTiming("eager", 2e-3, 2e-3, 2e-3), ModeTiming("compiled", 1e-3, 1e-3, 1e-3)]
    assert decide(times) == (
        "compiled",
        "fastest of 2 measured: a call 1.00 ms, 2.00 x eager (2.00 ms)",
    )
    assert break_even_calls(2e-3, 1e-3, 10.0) == 10_000
    assert break_even_calls(1e-3, 2e-3, 10.0) is None


def test_compiling_is_refused_before_it_costs_more_than_it_could_give() -> None:
    """The reason names the expected seconds and what is left, or what the calls take without it."""
    assert why_not_worth(20.0, 15.0, 1e-3, None) == (
        "expected to take 20.0 s to compile, 15.0 s of the budget are left"
    )
    assert why_not_worth(20.0, 100.0, 1e-3, 1000) == (
        "expected to take 20.0 s to compile, and all 1000 calls take only 1.00 s without it"
    )
    assert why_not_worth(20.0, 100.0, 1e-3, 100_000) is None


def test_nothing_measured_is_an_error() -> None:
    """There is no decision without a measurement."""
    with pytest.raises(PlanError, match="wanted at least one measured mode to decide on, got none"):
        decide([])


def test_the_report_reads_as_a_table() -> None:
    """The text is for people: one line a mode, the choice with its reason, counts and notes."""
    report = HybridReport(
        subject="MLP", device="cpu", chosen="compiled", reason="fastest of 2 measured", calls=1000,
        budget_s=60.0, notes=("a note",), counters={"eager_calls": 2, "rebuilds": 0},
        rows=(
            ModeRow(mode="eager", status="measured", call_s=1e-4, low_s=9e-5, high_s=1.1e-4),
            ModeRow(
                mode="compiled", status="measured", call_s=2e-5, low_s=1.9e-5, high_s=2.1e-5,
                compile_s=3.0, difference=1e-7, break_even=37500,
            ),
            ModeRow(mode="packaged", status="skipped", reason="no time"),
        ),
    )  # fmt: skip
    assert repr(report) == (
        "HybridReport(MLP on cpu, 1000 calls, budget 60.0 s)\n"
        "     mode      call     quartiles           compile  difference  earned back  why\n"
        "     eager     100 us   90.0 us .. 110 us\n"
        "  *  compiled  20.0 us  19.0 us .. 21.0 us  3.00 s   1.0e-07     37500 calls\n"
        "     packaged  skipped                                                        no time\n"
        "  chosen: compiled: fastest of 2 measured\n"
        "  counted: eager_calls 2\n"
        "  ! a note"
    )
