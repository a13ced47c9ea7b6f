"""Profiles and timelines that were edited by hand: refused where they are read, or usable."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.codec import Noun, decode, encode
from ridgeline.errors import FileFormatError, LawError, RidgelineError
from ridgeline.machine import Ceiling, Collective, CurvePoint, Link, Machine, Setting, SizePoint
from ridgeline.plan import Plan
from ridgeline.planner import choose
from ridgeline.simulator.step import simulate
from ridgeline.timeline import Span, Timeline
from ridgeline.verdict import verify
from strategies import (
    make_ceilings,
    make_collective,
    make_machine,
    make_timeline,
    make_workload,
    measured,
)

CPU = Setting(device="cpu", workers=2, threads=1)
MACHINE = make_machine(slowdown=(1.2, 1.1), dispatch_s=1e-5)
CURVED = Machine(
    fingerprint="test",
    measured_at="2026-01-01",
    host=MACHINE.host,
    devices=MACHINE.devices,
    ceilings=tuple(
        c
        for workers in (1, 2)
        for c in make_ceilings(
            Setting(device="cpu", workers=workers, threads=2 // workers),
            curve=((1e3, 1e8), (1e6, 5e8), (1e9, 1e9)),
        )
    ),
    dispatch=MACHINE.dispatch,
    collectives=MACHINE.collectives,
    overlaps=MACHINE.overlaps,
)
TIMELINE = make_timeline(
    [("forward", "compute", 0, 100), ("all_reduce/0", "communication", 50, 180)], workers=2
)
WORKLOAD = make_workload()


def _edited(noun: Noun, path: tuple[Any, ...], value: Any) -> bytes:
    """The file of a noun with another value at a path."""
    content = json.loads(encode(noun))
    del content["sha256"]
    place = content["value"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(content).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ("ceilings", 0, "rate", "value"),
            0,
            "wanted a finite rate in FLOP/s >= 1 and <= 1e+30, got 0",
        ),
        (
            ("ceilings", 0, "rate", "value"),
            -1.0,
            r"Expected `float` >= 0.0 - at `$.ceilings[0].rate.value`",
        ),
        (
            ("ceilings", 0, "rate", "value"),
            1e-300,
            "wanted a finite rate in FLOP/s >= 1 and <= 1e+30, got 1e-300",
        ),
        (("ceilings", 0, "curve", 1, "rate"), 0, "wanted a finite rate >= 1 and <= 1e+30, got 0"),
        (
            ("ceilings", 0, "curve", 0, "work"),
            0,
            "wanted a finite work >= 1e-30 and <= 1e+30, got 0",
        ),
        (
            ("ceilings", 0, "curve", 1, "work"),
            1e3,
            "wanted work in ascending order, each once, got 1000 after 1000; sort the table",
        ),
        (
            ("collectives", 0, "table"),
            [],
            "wanted a finite number of points of a size table >= 1, got 0",
        ),
        (
            ("collectives", 0, "setting", "workers"),
            1,
            "wanted a finite number of workers of a collective >= 2, got 1",
        ),
        (
            ("collectives", 0, "table", 0, "num_bytes"),
            0,
            "wanted a finite num_bytes >= 1 and <= 1e+30, got 0",
        ),
        (
            ("collectives", 0, "table", 1, "num_bytes"),
            1 << 20,
            "wanted num_bytes in ascending order, each once, got 16 after 1.04858e+06; sort the table",
        ),
        (
            ("collectives", 0, "table", 0, "seconds", "value"),
            0,
            "wanted a finite number of seconds >= 1e-30 and <= 1e+30, got 0",
        ),
        (("collectives", 0, "table", 0, "seconds", "value"), -1, "Expected `float` >= 0.0"),
        (("dispatch", 0, "seconds", "value"), -1, "Expected `float` >= 0.0"),
        (("dispatch", 0, "seconds", "value"), 1e300, r"Expected `float` <= 1e+30"),
        (("ceilings", 0, "setting", "workers"), 0, "Expected `int` >= 1"),
        (("ceilings", 0, "rate", "n"), -4, "Expected `int` >= 0"),
        (("ceilings", 0, "rate", "high"), 1e300, "Expected `float` <= 1e+30"),
        (("devices", 0, "memory_bytes"), -1, "Expected `int` >= 0"),
    ],
)
def test_profiles_out_of_range(path: tuple[Any, ...], value: Any, message: str) -> None:
    """Numbers that no law can use are told with their place in the file."""
    with pytest.raises(FileFormatError) as error:
        decode(Machine, _edited(CURVED, path, value), where="m.json")
    text = str(error.value)
    assert text.startswith("wanted a machine file, got content that does not fit in m.json: ")
    assert text.endswith("; the file is damaged or was edited, make it again")
    assert message in text
    assert f"`$.{path[0]}[0]" in text


@pytest.mark.parametrize(
    ("path", "unit", "wanted"),
    [
        (("ceilings", 0, "rate"), "TFLOP/s", "the rate of matmul in FLOP/s"),
        (("ceilings", -1, "rate"), "FLOP/s", "the rate of memory in B/s"),
        (("dispatch", 0, "seconds"), "us", "the dispatch of forward in s"),
        (("collectives", 0, "table", 0, "seconds"), "ms", "the time of a transfer in s"),
        (("overlaps", 0, "compute_slowdown"), "%", "the slowdown of computing in x"),
    ],
)
def test_numbers_in_other_units(path: tuple[Any, ...], unit: str, wanted: str) -> None:
    """112 TFLOP/s are no 112 FLOP/s, of which a step of 48 hours would be made."""
    with pytest.raises(FileFormatError) as error:
        decode(Machine, _edited(CURVED, (*path, "unit"), unit), where="m.json")
    assert f"wanted {wanted}, got " in str(error.value)
    assert f" in '{unit}'; give the number in that unit - at `$.{path[0]}[" in str(error.value)


@pytest.mark.parametrize("cores", [0, -2])
def test_hosts_without_cores(cores: int) -> None:
    """A host has one core at least."""
    with pytest.raises(FileFormatError, match=r"Expected `int` >= 1 - at `\$.host.cores`"):
        decode(Machine, _edited(CURVED, ("host", "cores"), cores), where="m.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("steps_ns",), [], "Expected `array` of length >= 1 - at `$.steps_ns`"),
        (("steps_ns",), [-1], "Expected `int` >= 0 - at `$.steps_ns[0]`"),
        (("workers",), 0, "Expected `int` >= 1 - at `$.workers`"),
        (("workers",), -1, "Expected `int` >= 1 - at `$.workers`"),
        (("spans", 0, "start_ns"), -5, "Expected `int` >= 0 - at `$.spans[0].start_ns`"),
        (
            ("spans", 1, "end_ns"),
            49,
            (
                "wanted a span that ends at 50 ns or later, as it begins then, got 'all_reduce/0' on "
                "communication with an end at 49 ns; record the step again"
            ),
        ),
    ],
)
def test_timelines_out_of_range(path: tuple[Any, ...], value: Any, message: str) -> None:
    """Times that no step has are told with their place in the file."""
    with pytest.raises(FileFormatError) as error:
        decode(Timeline, _edited(TIMELINE, path, value), where="t.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CurvePoint(work=1.0, rate=0.0),
        lambda: CurvePoint(work=0.0, rate=1e9),
        lambda: SizePoint(num_bytes=0, seconds=measured(1.0, "s")),
        lambda: SizePoint(num_bytes=1, seconds=measured(0.0, "s")),
        lambda: Ceiling(
            setting=CPU, family="matmul", dtype="float32", rate=measured(0.0, "FLOP/s")
        ),
        lambda: Collective(setting=CPU, operation="all_reduce", backend="gloo", table=()),
        lambda: make_collective(Setting(device="cpu", workers=1, threads=1)),
        lambda: Link(direction="host_to_device", table=make_collective(CPU).table[::-1]),
        lambda: make_timeline([("forward", "compute", 5, 4)]),
    ],
)
def test_values_out_of_range(make: Any) -> None:
    """The same holds for values that are made in a program."""
    with pytest.raises(LawError):
        make()


def test_zeros_that_mean_something_stay() -> None:
    """No dispatch, no step recorded, a span without length: all of these occur."""
    silent = make_machine(dispatch_s=0.0, timings={"view": 0.0})
    assert decode(Machine, encode(silent), where="m.json") == silent
    empty = make_timeline([("input", "host", 0, 0)], steps_ns=(0,))
    assert decode(Timeline, encode(empty), where="t.json") == empty
    assert Span(name="a", lane="host", start_ns=0, end_ns=0).duration_ns == 0


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(inner, (*path, key))
        if isinstance(value, list):
            yield path
    elif not isinstance(value, str):
        yield path


values = st.sampled_from((0, -1, 1, 1e-300, 1e300, 1e18, 2**53, 0.5)) | st.floats(allow_nan=False)


@given(
    st.sampled_from(list(_places(json.loads(encode(CURVED))["value"]))),
    values | st.just([]),
    st.sampled_from((Plan(), Plan(workers=2, threads=1), Plan(workers=3))),
)
def test_an_edited_profile_is_refused_or_used(
    path: tuple[Any, ...], value: Any, plan: Plan
) -> None:
    """Whatever number is changed, there is a prediction that can be saved, or an error on purpose."""
    try:
        machine = decode(Machine, _edited(CURVED, path, value), where="m.json")
        timeline = simulate(machine, WORKLOAD, plan)
        best = choose(machine, {1: WORKLOAD, 2: WORKLOAD}).best
    except RidgelineError:
        return
    assert decode(Timeline, encode(timeline), where="t.json") == timeline
    assert best.step_s >= 0.0


@given(st.sampled_from(list(_places(json.loads(encode(TIMELINE))["value"]))), values | st.just([]))
def test_an_edited_timeline_is_refused_or_used(path: tuple[Any, ...], value: Any) -> None:
    """Whatever number is changed, there is a verdict, or an error on purpose."""
    try:
        timeline = decode(Timeline, _edited(TIMELINE, path, value), where="t.json")
        verdict = verify(timeline, timeline)
    except RidgelineError:
        return
    assert verdict.passed
    assert verdict.text


@pytest.mark.parametrize("path", [("workers",), ("spans", 0, "end_ns"), ("steps_ns", 0)])
def test_a_number_that_has_changed_in_its_range_is_told_by_the_digest(
    path: tuple[Any, ...],
) -> None:
    """Programs may write the text anew; whoever edits a value takes the digest out."""
    written = json.loads(encode(TIMELINE))
    anew = json.dumps(written, indent=3).replace("o", "\\u006f")
    assert decode(Timeline, anew.encode(), where="t.json") == TIMELINE
    edited = json.loads(_edited(TIMELINE, path, 7))
    assert decode(Timeline, json.dumps(edited).encode(), where="t.json") != TIMELINE
    damaged = {**edited, "sha256": written["sha256"]}
    with pytest.raises(FileFormatError) as error:
        decode(Timeline, json.dumps(damaged).encode(), where="t.json")
    assert str(error.value) == (
        "wanted the timeline that was written, got another value than its sha256 tells in t.json; if it was "
        "edited on purpose take the line `sha256` out, else the file is damaged: make it again"
    )


def test_a_name_that_stands_twice_is_refused() -> None:
    """The last one would count, and what was written above it by hand would not."""
    above = encode(MACHINE).replace(b'"value": {', b'"value": {"cluster": [],')
    for data in (above, re.sub(rb'"sha256": "\w+",', b"", above)):
        with pytest.raises(FileFormatError, match="`cluster` stands there twice; the file"):
            decode(Machine, data, where="m.json")


def test_values_of_two_kinds_are_not_compared() -> None:
    """They have no leaf in common, so that all of both would differ."""
    assert TIMELINE.diff(TIMELINE) == {}
    with pytest.raises(FileFormatError) as error:
        Noun.diff(TIMELINE, Plan())
    assert str(error.value) == (
        "wanted another Timeline, got a Plan in Timeline.diff(); load both from timeline files"
    )


def test_lists_within_lists_without_end_are_damage() -> None:
    """Told as any other damage, and not as a limit of the interpreter."""
    data = encode(TIMELINE).replace(b'"value": {', b'"value": ' + b"[" * 100_000)
    with pytest.raises(
        FileFormatError, match="wanted a timeline file, got content that does not fit"
    ):
        decode(Timeline, data, where="deep.json")
