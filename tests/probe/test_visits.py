"""A run comes back to what it measures: visits become one profile, whose numbers say how they repeat."""

import json
import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.codec import decode, encode
from ridgeline.machine import (
    Ceiling,
    Collective,
    CurvePoint,
    Dispatch,
    Machine,
    OperatorTiming,
    Overlap,
    Quantity,
    Setting,
    SizePoint,
)
from ridgeline.machine.quantity import Sampled
from ridgeline.probe import survey
from ridgeline.probe.findings import Findings, Request
from ridgeline.probe.visits import VISITS, combined
from strategies import make_machine

ONE = Setting(device="cpu", workers=1, threads=1)
TWO = Setting(device="cpu", workers=1, threads=2)
samples = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=5)


def dispatch_of(seconds: list[float]) -> Findings:
    """What one visit finds of one number."""
    number = Sampled.measured(seconds, "s")
    return Findings(dispatch=(Dispatch(device="cpu", phase="forward", seconds=number),))


@given(st.lists(samples, min_size=2, max_size=4))
def test_numbers_are_those_of_all_samples(visits: list[list[float]]) -> None:
    """Median and quartiles as if they had been taken at once; the range holds the median, and no samples stay."""
    (entry,) = combined([[dispatch_of(visit) for visit in visits]]).dispatch
    at_once = Quantity.measured([sample for visit in visits for sample in visit], "s")
    found = msgspec.structs.replace(entry.seconds, repeat_low=None, repeat_high=None)
    assert found == at_once
    assert type(entry.seconds) is Quantity
    assert entry.seconds.repeat_low is not None
    assert entry.seconds.repeat_high is not None
    assert entry.seconds.repeat_low < entry.seconds.value < entry.seconds.repeat_high


def test_a_range_scales_with_its_number() -> None:
    """So a unit or a what-if changes both."""
    number = Quantity.visited([[1.0], [1.1], [0.9]], "s", 0.1)
    doubled = number.times(2.0)
    assert (doubled.repeat_low, doubled.repeat_high) == (
        2.0 * (number.repeat_low or 0.0),
        2.0 * (number.repeat_high or 0.0),
    )
    assert doubled.repeats_within == pytest.approx(number.repeats_within)
    assert str(number) == "1.00 s (spread 10.0 %, repeats within 27.4 %, n=3)"


def test_what_was_visited_once_says_what_others_do_or_nothing() -> None:
    """Drift that all numbers have in common is that of the whole run; a run of one visit knows none."""
    once = dispatch_of([1.0, 2.0, 3.0])
    alone = combined([[once]]).dispatch[0].seconds
    assert alone == Quantity.measured([1.0, 2.0, 3.0], "s")
    assert alone.repeats_within is None
    assert str(alone) == "2.00 s (spread 50.0 %, n=3)"
    thrice = [dispatch_of([seconds]) for seconds in (1.0, 1.2, 1.4)]
    both = combined([[once], thrice]).dispatch
    assert all(entry.seconds.repeats_within is not None for entry in both)


def test_tables_are_joined_by_what_their_entries_are_about() -> None:
    """Sizes that one visit had no time for have the samples of the others; entries alike keep their places."""

    def visit(scale: float, sizes: tuple[int, ...]) -> Findings:
        def number(value: float, unit: str = "s") -> Sampled:
            return Sampled.measured([scale * value], unit)

        table = tuple(SizePoint(num_bytes=size, seconds=number(size)) for size in sizes)
        overlaps = tuple(
            Overlap(
                setting=ONE,
                compute_slowdown=number(1.0, "x"),
                communication_slowdown=number(1.0, "x"),
                kernel=number(kernel),
            )
            for kernel in (1.0, 10.0)
        )
        pair = Setting(device="cpu", workers=2, threads=1)
        collective = Collective(setting=pair, operation="all_reduce", backend="gloo", table=table)
        return Findings(
            collectives=(collective,), overlaps=overlaps, warnings=("slow", f"{scale:g}")
        )

    found = combined([[visit(1.0, (1, 2)), visit(3.0, (1, 2, 4)), visit(5.0, (1,))]])
    (table,) = (entry.table for entry in found.collectives)
    assert [(point.num_bytes, point.seconds.value) for point in table] == [(1, 3), (2, 4), (4, 12)]
    kernels = [entry.kernel for entry in found.overlaps]
    assert [kernel.value for kernel in kernels if kernel is not None] == [3.0, 30.0]
    assert found.warnings == ("slow", "1", "3", "5")


def test_a_ceiling_has_the_median_of_its_visits_at_each_size() -> None:
    """And the best rate over all samples of the best."""

    def visit(*rates: float) -> Findings:
        curve = tuple(CurvePoint(work=work, rate=rate) for work, rate in enumerate(rates, 1))
        best = Sampled.measured([max(rates)], "FLOP/s")
        ceiling = Ceiling(setting=ONE, family="matmul", dtype="float32", rate=best, curve=curve)
        return Findings(ceilings=(ceiling,))

    (ceiling,) = combined([[visit(10, 30), visit(20, 20, 40), visit(30, 25, 35)]]).ceilings
    assert [(point.work, point.rate) for point in ceiling.curve] == [(1, 20), (2, 25), (3, 37.5)]
    assert ceiling.rate.value == 35


def test_timings_of_operators_stay_as_they_are() -> None:
    """They come from one visit, and are no raw samples."""
    timing = OperatorTiming(setting=ONE, key="aten.mm", seconds=Quantity.measured([1.0, 2.0], "s"))
    found = Findings(timings=(timing,), warnings=("w",))
    assert combined([[found]]) == found


def test_a_run_comes_back_when_it_has_measured_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """So seconds lie between the visits to a number; what was found is kept after each part of each."""
    visited: list[str] = []

    def found(name: str, make: Callable[[float], Any]) -> Callable[..., Any]:
        def measure(where: object, *_: object, quick: bool) -> Any:
            visited.append(f"{name} {where}" if isinstance(where, Setting) else name)
            return make(float(len(visited)))

        return measure

    def ceilings(value: float) -> tuple[Ceiling, ...]:
        rate = Sampled.measured([value], "FLOP/s")
        return (Ceiling(setting=ONE, family="matmul", dtype="float32", rate=rate),)

    monkeypatch.setattr(
        survey, "measure_dispatch", found("dispatch", lambda v: dispatch_of([v]).dispatch)
    )
    monkeypatch.setattr(survey, "measure_ceilings", found("ceilings", ceilings))
    kept: list[Findings] = []
    request = Request(quick=True, ceilings=(ONE, TWO), dispatch=True)
    result = survey.measure_here(request, kept.append)
    each = ["dispatch", f"ceilings {ONE}", f"ceilings {TWO}"]
    assert visited == each * VISITS
    assert len(kept) == len(visited)
    assert kept[-1] == result
    assert result.dispatch[0].seconds.value == statistics.median([1.0, 4.0, 7.0])
    assert [entry.rate.value for entry in result.ceilings] == [5.0, 6.0]


def test_profiles_of_earlier_releases_are_read() -> None:
    """Their numbers have no range, and say none."""
    machine = make_machine()
    text = json.loads(encode(machine))
    del text["sha256"]

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if not k.startswith("repeat_")}
        return [without(part) for part in value] if isinstance(value, list) else value

    old = json.dumps(without(text)).encode()
    assert b"repeat_" not in old
    assert decode(Machine, old, where="machine.json") == machine
