"""What of a measurement fits into limited seconds: laws of `fitted`, and the seconds that are expected."""

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay import workload_of

from ridgeline.machine import Setting
from ridgeline.planner.assumed import FLOPS
from ridgeline.probe.findings import Request
from ridgeline.probe.fitting import LEAST_SAMPLES_S, TIMED_PASSES, expected_s, fitted
from ridgeline.workload import Workload

ONE = Setting(device="cpu", workers=1, threads=1)


def workload(num_variants: int = 1, flops: int = 10**9) -> Workload:
    """A step of `flops` an operator, traced in other memory formats as well."""
    plain = workload_of()
    ops = tuple(msgspec.structs.replace(op, flops=flops) for op in plain.ops)
    plain = msgspec.structs.replace(plain, ops=ops)
    other = msgspec.structs.replace(plain, memory_format="channels_last")
    return msgspec.structs.replace(plain, variants=(other,) * num_variants)


def request(load: Workload) -> Request:
    return Request(quick=True, ceilings=(ONE,), timings=(ONE,), dispatch=True, workload=load)


@given(st.floats(0.0, 60.0), st.integers(0, 3), st.integers(10**3, 10**11))
def test_the_step_itself_is_always_timed(limit_s: float, num_variants: int, flops: int) -> None:
    """Whatever is left out, each part of it has a line, and what fits whole is left as it is."""
    asked = request(workload(num_variants, flops))
    found, left_out = fitted(asked, limit_s)
    assert found.timings == asked.timings
    assert found.ceilings == asked.ceilings
    assert found.traces[0].ops == asked.traces[0].ops
    assert bool(left_out) == (len(found.traces) < len(asked.traces) or found.visits == 1)
    assert found.visits is None or expected_s(msgspec.structs.replace(found, visits=None)) > limit_s
    assert expected_s(found) <= max(limit_s, expected_s(fitted(asked, 0.0).request)) + 1e-9
    assert found.samples_s is None or found.samples_s >= LEAST_SAMPLES_S
    if expected_s(asked) <= limit_s:
        assert found == asked


def test_the_network_that_was_not_timed_is() -> None:
    """A step in two memory formats fits into a third of 40 s with all that is measured besides."""
    found, left_out = fitted(request(workload(1, 10**7)), 14.0)
    assert not left_out
    assert len(found.traces) == 2
    assert expected_s(found) <= 14.0


def test_samples_are_shared_out_before_a_trace_is_left_out() -> None:
    """Between the two limits both traces are timed, each for a part of the usual seconds."""
    asked = request(workload(1, flops=10**11))
    whole_s = expected_s(asked)
    found, left_out = fitted(asked, whole_s - 2.0)
    assert not left_out
    assert found.samples_s == pytest.approx(3.0)
    assert expected_s(found) == pytest.approx(whole_s - 2.0)


def test_one_visit_to_the_rates_makes_room_for_the_step() -> None:
    """Where else the operators of the step were not timed at all; the traces that fit then are."""
    asked = request(workload(1, 10**7))
    least_s = expected_s(msgspec.structs.replace(asked, samples_s=LEAST_SAMPLES_S, visits=1))
    found, (note,) = fitted(asked, least_s)
    assert (found.visits, len(found.traces)) == (1, 2)
    assert note == (
        "rates were taken once, not 3 times, so that nothing tells how they repeat: time was short"
    )
    without = msgspec.structs.replace(asked, workload=None, timings=())
    assert fitted(without, 0.1) == (without, ())


def test_long_steps_take_longer_to_time() -> None:
    """Some passes are made however long one takes."""
    load = workload(0, 10**12)
    longer = workload(0, 2 * 10**12)
    more_s = expected_s(request(longer)) - expected_s(request(load))
    assert more_s == pytest.approx(
        TIMED_PASSES * len(load.ops) * 1e12 / FLOPS["cpu"]["float32"], rel=1e-3
    )


def test_without_a_limit_everything_is_measured() -> None:
    """Nor where no operator is asked for."""
    asked = request(workload())
    assert fitted(asked, math.inf) == (asked, ())
    bare = Request(quick=True, ceilings=(ONE,))
    assert fitted(bare, 0.0) == (bare, ())


def test_codecs_are_left_out_before_anything_of_the_step() -> None:
    """Said so, and only where they have no room; alone they are measured however long it takes."""
    two = Setting(device="cpu", workers=2, threads=1)
    asked = msgspec.structs.replace(request(workload(1)), codecs=(two,))
    whole_s = expected_s(asked)
    assert fitted(asked, whole_s) == (asked, ())
    found, (note,) = fitted(asked, whole_s - 0.5)
    assert found == msgspec.structs.replace(asked, codecs=())
    assert note.startswith("how long encoding gradients takes was not timed: that takes about 5.0")
    alone = Request(quick=True, codecs=(two,))
    assert fitted(alone, 1.0) == (alone, ())
