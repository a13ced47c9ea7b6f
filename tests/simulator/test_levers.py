"""Levers: gains are those of two predictions, and intervals follow the machine's spread."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from printed import as_text
from ridgeline.errors import MachineError
from ridgeline.machine import Machine, Quantity
from ridgeline.plan import Plan
from ridgeline.reporting.scaling_grids import gain_text, levers_grid
from ridgeline.reporting.terminal.text import grid_text
from ridgeline.simulator.curves.levers import Lever, elsewhere, levers
from ridgeline.simulator.curves.what_if import PARTS, what_if
from ridgeline.simulator.step import simulate
from strategies import make_machine, make_workload

TWO = Plan(workers=2, threads=1)


def spread(machine: Machine, width: float) -> Machine:
    """The machine with quartiles of every ceiling so far from its median."""

    def wide(one: Quantity) -> Quantity:
        ends = {"low": one.value * (1 - width), "high": one.value * (1 + width)}
        return msgspec.structs.replace(one, **ends)

    ceilings = tuple(msgspec.structs.replace(c, rate=wide(c.rate)) for c in machine.ceilings)
    return msgspec.structs.replace(machine, ceilings=ceilings)


@settings(max_examples=20)
@given(st.sampled_from(PARTS), st.floats(0.1, 100.0), st.sampled_from([1, 2]))
def test_a_gain_is_the_ratio_of_two_predictions(part: str, factor: float, workers: int) -> None:
    """On a machine without spread nothing is uncertain: the interval is that ratio."""
    machine, workload = make_machine(dispatch_s=1e-4, latency_s=1e-4), make_workload()
    plan = Plan(workers=workers, threads=2 // workers)
    (found,) = levers(machine, workload, plan, [{part: factor}])
    now = simulate(machine, workload, plan).step_ns
    then = simulate(what_if(machine, {part: factor}, workload), workload, plan).step_ns
    assert found.step_s == pytest.approx(1e-9 * then)
    assert found.gain == pytest.approx(now / then)
    assert (found.low, found.high) == (pytest.approx(found.gain), pytest.approx(found.gain))


def test_a_quartile_of_zero_is_no_certainty() -> None:
    """It has no logarithm: numbers are drawn as far below their median as the other quartile is above it."""
    machine, workload = make_machine(dispatch_s=1e-3), make_workload()
    found = []
    for low in (-1.0, 0.0, 0.8):
        rates = [
            msgspec.structs.replace(c.rate, low=low * c.rate.value, high=1.25 * c.rate.value)
            for c in machine.ceilings
        ]
        pairs = zip(machine.ceilings, rates, strict=True)
        ceilings = tuple(msgspec.structs.replace(c, rate=rate) for c, rate in pairs)
        drawn = msgspec.structs.replace(machine, ceilings=ceilings)
        found += levers(drawn, workload, Plan(), [{"compute": 2.0}])
    assert found[0].low < found[0].gain < found[0].high
    assert found[0] == found[1]
    assert found[1].low == pytest.approx(found[2].low)
    assert found[1].high == pytest.approx(found[2].high)


def test_a_wider_spread_is_a_wider_interval() -> None:
    """The interval holds the gain, grows with the spread, and comes out again with the same seed."""
    machine, workload = make_machine(dispatch_s=1e-3), make_workload()
    widths = []
    for width in (0.01, 0.1):
        (found,) = levers(spread(machine, width), workload, Plan(), [{"compute": 2.0}])
        assert found.low < found.gain < found.high
        widths.append(found.high - found.low)
        assert (found,) == levers(spread(machine, width), workload, Plan(), [{"compute": 2.0}])
    assert widths[1] > 3 * widths[0]


@pytest.mark.parametrize(("low", "high"), [(1e-20, 1e20), (2e9, 5e8)])
def test_quartiles_that_nobody_measures_are_drawn_by(low: float, high: float) -> None:
    """An edited profile's: far apart they make no number infinite, in the wrong order none certain."""
    machine = make_machine(dispatch_s=1e-3)
    ceilings = tuple(
        msgspec.structs.replace(each, rate=msgspec.structs.replace(each.rate, low=low, high=high))
        for each in machine.ceilings
    )
    edited = msgspec.structs.replace(machine, ceilings=ceilings)
    (found,) = levers(edited, make_workload(), Plan(), [{"compute": 2.0}])
    assert found.low < found.gain < found.high


def test_what_slows_both_says_nothing_of_the_gain() -> None:
    """Of a step that only computes, twice the computing is twice as fast, however fast that is."""
    machine = spread(make_machine(dispatch_s=0.0), 0.2)
    (found,) = levers(machine, make_workload(), Plan(), [{"compute": 2.0}])
    assert (found.low, found.high) == (pytest.approx(2.0, rel=1e-6), pytest.approx(2.0, rel=1e-6))


def test_free_parts_leave_the_others() -> None:
    """Without communication a step of two workers is that of one alone."""
    machine, workload = make_machine(latency_s=1e-3), make_workload()
    (found,) = levers(machine, workload, TWO, [{"communication": 1e9}])
    alone = simulate(machine, workload, TWO).total_ns("wait")
    assert found.step_s == pytest.approx(
        1e-9 * (simulate(machine, workload, TWO).step_ns - alone), rel=1e-3
    )


def test_another_machine() -> None:
    """The same one gains nothing; one with twice the rates is twice as fast."""
    machine, workload = make_machine(dispatch_s=0.0), make_workload()
    assert elsewhere(machine, machine, workload, Plan()).gain == pytest.approx(1.0)
    other = what_if(machine, {"compute": 2.0}, workload)
    assert elsewhere(machine, other, workload, Plan()).gain == pytest.approx(2.0)


def test_what_an_edited_profile_leaves_alone_says_nothing_about_the_gain() -> None:
    """Against itself a machine gains nothing for sure; against another measurement of it nobody is sure."""
    machine, workload = spread(make_machine(dispatch_s=0.0), 0.2), make_workload()
    itself = elsewhere(machine, machine, workload, Plan())
    assert (itself.low, itself.gain, itself.high) == (1.0, 1.0, 1.0)
    again = msgspec.structs.replace(machine, measured_at="2026-01-02")
    found = elsewhere(machine, again, workload, Plan())
    assert found.low < 0.95 < 1.05 < found.high


def test_a_host_that_issues_faster() -> None:
    """What each operator's issue was timed at follows `launch`, as the rest of dispatch does."""
    workload = make_workload()
    machine = make_machine(timings={op.key: 1e-3 for op in workload.ops})
    issue = Quantity.measured([2e-5], "s")
    timings = tuple(msgspec.structs.replace(t, issue=issue) for t in machine.timings)
    machine = msgspec.structs.replace(machine, timings=timings)
    faster = what_if(machine, {"launch": 4.0}, workload)
    assert {timing.issue.value for timing in faster.timings} == {5e-6}
    assert {timing.issue.source for timing in faster.timings} == {"assumed"}


def test_one_part_by_two_words_is_refused() -> None:
    """They would multiply or replace each other; neither is meant."""
    with pytest.raises(
        MachineError, match="wanted each part once, got dispatch twice in the what-if"
    ):
        what_if(make_machine(), {"launch": 2.0, "dispatch": 3.0})


def test_levers_as_text() -> None:
    """The largest gain first, and whether any is beyond its spread."""

    def lever(part: str, gain: float, low: float) -> Lever:
        return Lever(factors={part: 2.0}, step_s=1e-3 / gain, gain=gain, low=low, high=gain + 0.1)

    text = as_text(
        grid_text(levers_grid([lever("memory", 1.05, 1.0), lever("compute", 1.5, 1.4)], ""))
    )
    assert "Compute helps most." in text
    assert text.index("compute 2 x") < text.index("memory 2 x")
    assert "1.40 .. 1.60" in text
    unsure = [lever("memory", 1.5, 1.0), lever("compute", 1.2, 1.1)]
    assert "Compute helps by more than its spread." in as_text(grid_text(levers_grid(unsure, "")))
    text = as_text(grid_text(levers_grid([lever("memory", 1.05, 1.0)], "")))
    assert "No part alone helps by more than its spread." in text
    text = as_text(
        grid_text(levers_grid([lever("memory", 1.2, 1.1), lever("compute", 1.5, 1.4)], ""))
    )
    assert "Compute, then memory help." in text
    assert gain_text(lever("compute", 1.5, 1.4)) == "1.50 x (1.40 to 1.60)"
