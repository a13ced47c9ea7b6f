"""Costs of operators and collectives: which source is used, and what is said about it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import MachineError
from ridgeline.laws.curves import interpolate, table_seconds
from ridgeline.machine import Ceiling, Collective, OperatorTiming, Setting, SizePoint
from ridgeline.simulator.exchange.communication import collective_seconds, ring_latency
from ridgeline.simulator.pricing.costs import Prices, op_seconds
from ridgeline.simulator.pricing.settings import nearest_setting
from strategies import (
    make_ceilings,
    make_collective,
    make_machine,
    make_op,
    measured,
)

ONE = Setting(device="cpu", workers=1, threads=2)
TWO = Setting(device="cpu", workers=2, threads=1)
GPU = Setting(device="cuda", workers=2)


def test_the_roofline_of_an_operator() -> None:
    """Without timing or curve an operator takes max(F / pi, Q / beta)."""
    machine = make_machine()
    cost = op_seconds(machine, make_op("forward", flops=2_000_000, num_bytes=1_000_000), ONE)
    assert (cost.seconds, cost.bound, cost.source) == (2e-3, "compute", "roofline")
    cost = op_seconds(machine, make_op("forward", flops=1_000_000, num_bytes=2_000_000), ONE)
    assert (cost.seconds, cost.bound) == (2e-3, "memory")
    assert (cost.ideal_s, cost.roofline_s) == (1e-3, 2e-3)


def test_a_timing_comes_first() -> None:
    """An exact timing is used as it is; on the CPU it contains its dispatch."""
    op = make_op("forward", flops=1_000_000)
    machine = make_machine(timings={op.key: 5e-3}, dispatch_s=1e-4)
    cost = op_seconds(machine, op, ONE)
    assert (cost.seconds, cost.source, cost.has_dispatch) == (5e-3, "timing", True)
    assert cost.ideal_s == pytest.approx(1e-3)
    on_gpu = make_machine(device="cuda", timings={op.key: 5e-3})
    assert not op_seconds(on_gpu, op, GPU).has_dispatch


def test_a_timing_never_lies_below_its_roofline_parts() -> None:
    """An operator that beats the ceiling (in cache, say) has all its time at the limit."""
    op = make_op("forward", flops=1_000_000)
    cost = op_seconds(make_machine(timings={op.key: 1e-4}), op, ONE)
    assert cost.ideal_s == cost.roofline_s == 1e-4


def test_a_curve_comes_before_the_roofline() -> None:
    """The rate at the operator's size is read from the family's curve, log-log."""
    curve = [(1e3, 1e6), (1e7, 1e8)]
    machine = msgspec.structs.replace(make_machine(), ceilings=make_ceilings(ONE, 1e9, curve))
    cost = op_seconds(machine, make_op("forward", flops=100_000), ONE)
    assert cost.source == "curve"
    assert cost.seconds == pytest.approx(1e5 / 1e7)
    assert cost.roofline_s == pytest.approx(1e5 / 1e9)


@pytest.mark.parametrize("num_bytes", [1 << 10, 1 << 16, (1 << 24) - 1, 1 << 24, 1 << 30])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_small_copy_takes_as_long_as_any_small_kernel(device: Any, num_bytes: int) -> None:
    """On a GPU, where the curve of copies begins with large ones; on a CPU dispatch stands for that."""
    kernels = [(float(1 << 14), 1.6e8), (float(1 << 16), 6.25e8), (float(1 << 24), 1e9)]
    copies = [(float(1 << 24), 1e9), (float(1 << 30), 2e9)]
    setting = Setting(device=device, workers=1)
    ceilings = (*make_ceilings(setting, 4e9, kernels)[:3], *make_ceilings(setting, 4e9, copies)[3:])
    machine = msgspec.structs.replace(make_machine(device=device), ceilings=ceilings)
    cost = op_seconds(machine, make_op("forward", num_bytes=num_bytes, family="copy"), setting)
    is_small = device == "cuda" and num_bytes < 1 << 24
    rate = interpolate(kernels if is_small else copies, num_bytes)
    assert cost.seconds == pytest.approx(num_bytes / rate)


def test_dispatch_binds_small_operators() -> None:
    """An operator whose dispatch is longer than its work is bound by it."""
    machine = make_machine(dispatch_s=1e-3)
    assert op_seconds(machine, make_op("forward", flops=10), ONE).bound == "dispatch"


def test_views_cost_nothing_but_dispatch() -> None:
    """A view moves nothing whatever its shapes say."""
    cost = op_seconds(make_machine(), make_op("forward", family="view", num_bytes=1 << 20), ONE)
    assert (cost.seconds, cost.bound) == (0.0, "dispatch")


def test_a_setting_that_was_not_measured_is_assumed_and_noted() -> None:
    """The nearest setting serves, the source says so and the price list has a note."""
    machine = make_machine(settings=[ONE])
    list_ = Prices(machine, TWO, "as-is")
    cost = list_.op(make_op("forward", flops=1_000_000))
    assert (cost.seconds, cost.source) == (1e-3, "assumed")
    assert list_.notes == (
        "ceilings at 2 x 1 cpu threads were not measured: assumed as at 1 x 2 cpu threads",
    )


def test_a_curve_of_the_setting_beats_a_timing_of_another() -> None:
    """Timings of another setting are used only when nothing is known of this one."""
    op = make_op("forward", flops=1_000_000)
    timing = OperatorTiming(setting=ONE, key=op.key, seconds=measured(9e-3, "s"))
    both = msgspec.structs.replace(make_machine(), timings=(timing,))
    assert op_seconds(both, op, TWO).seconds == 1e-3
    one = msgspec.structs.replace(make_machine(settings=[ONE]), timings=(timing,))
    cost = op_seconds(one, op, TWO)
    assert (cost.seconds, cost.source) == (9e-3, "assumed")


def test_gpus_serve_one_worker_each() -> None:
    """What one GPU does is known whatever the number of workers."""
    machine = make_machine(device="cuda", settings=[Setting(device="cuda", workers=1)])
    cost = op_seconds(
        machine, make_op("forward", flops=1_000_000), Setting(device="cuda", workers=8)
    )
    assert cost.source == "roofline"


def test_bf16_uses_the_ceiling_of_its_dtype() -> None:
    """Lower precision changes the rate of operators that compute, and only of those."""
    fast = Ceiling(setting=ONE, family="matmul", dtype="bfloat16", rate=measured(4e9, "FLOP/s"))
    machine = make_machine()
    machine = msgspec.structs.replace(machine, ceilings=(*machine.ceilings, fast))
    op = make_op("forward", flops=4_000_000)
    assert op_seconds(machine, op, ONE, precision="bf16").seconds == pytest.approx(1e-3)
    add = make_op("forward", num_bytes=1_000_000, family="elementwise")
    assert op_seconds(machine, add, ONE, precision="bf16").seconds == pytest.approx(1e-3)


def test_a_dtype_that_was_not_measured_is_assumed_and_noted() -> None:
    """bf16 without a bf16 ceiling is not silently fast."""
    list_ = Prices(make_machine(), ONE, "bf16")
    assert list_.op(make_op("forward", flops=1_000_000)).source == "assumed"
    assert list_.notes == ("matmul in bfloat16 was not measured: assumed as matmul in float32",)


def test_no_ceiling_at_all_is_an_error() -> None:
    """Nothing is guessed about a machine of which nothing is known."""
    machine = msgspec.structs.replace(make_machine(), ceilings=())
    with pytest.raises(MachineError) as error:
        op_seconds(machine, make_op("forward", flops=1), ONE)
    assert str(error.value) == (
        "wanted the matmul ceiling for float32 at 1 x 2 cpu threads, got a profile that has only nothing "
        "(test); run `ridgeline measure`"
    )


def test_dispatch_that_was_not_measured_is_noted() -> None:
    """No dispatch cost is assumed only aloud."""
    list_ = Prices(msgspec.structs.replace(make_machine(), dispatch=()), ONE, "as-is")
    assert list_.dispatch("forward") == 0.0
    assert list_.notes == ("dispatch of forward was not measured: assumed to take no time",)


def test_nearest_setting() -> None:
    """Workers and threads count as ratios; another device never serves."""
    many = [ONE, Setting(device="cpu", workers=4, threads=1), GPU]
    assert nearest_setting(many, TWO) == Setting(device="cpu", workers=4, threads=1)
    assert nearest_setting([GPU], TWO) is None


points = st.lists(
    st.tuples(st.integers(1, 10**9), st.floats(1e-6, 1e3)),
    min_size=1,
    max_size=8,
    unique_by=lambda p: p[0],
).map(sorted)


@given(points)
def test_interpolation_passes_through_its_points(table: list[tuple[int, float]]) -> None:
    """A measured size costs what was measured."""
    for x, y in table:
        assert interpolate(table, x) == pytest.approx(y)
        assert table_seconds(table, x) == pytest.approx(y)


@given(points, st.floats(1, 1e12))
def test_tables_stay_between_neighbours(table: list[tuple[int, float]], size: float) -> None:
    """Between two sizes time lies between their times, and nowhere is it negative."""
    seconds = table_seconds(table, size)
    assert seconds > 0
    below = [y for x, y in table if x <= size] or [table[0][1]]
    above = [y for x, y in table if x >= size]
    if above:
        assert min(below[-1], above[0]) * 0.999 <= seconds <= max(below[-1], above[0]) * 1.001
    else:
        assert seconds >= table[-1][1] * 0.999


def test_collective_interpolates_the_measured_table() -> None:
    """A measured number of workers is looked up without a note; one worker costs nothing."""
    machine = make_machine(latency_s=0.0, bandwidth=1e9)
    cost = collective_seconds(machine, "all_reduce", 3_000_000, TWO)
    assert cost.seconds == pytest.approx(3e-3)
    assert cost.note == ""
    assert collective_seconds(machine, "all_reduce", 3_000_000, ONE) == (0.0, "")


def test_other_world_sizes_follow_the_ring() -> None:
    """8 workers from 2: latency x 7, bytes x 1.75, and a note that says so."""
    machine = make_machine(latency_s=1e-3, bandwidth=1e9)
    eight = Setting(device="cpu", workers=8, threads=1)
    cost = collective_seconds(machine, "all_reduce", 1 << 28, eight)
    assert cost.seconds == pytest.approx(7e-3 + 1.75 * (1 << 28) / 1e9, rel=0.02)
    assert collective_seconds(machine, "all_reduce", 1, eight).seconds == pytest.approx(
        7e-3, rel=0.01
    )
    assert cost.note == (
        "all_reduce over 8 workers was not measured: assumed by the ring law from 2 workers"
    )


def test_the_largest_measured_world_is_the_base() -> None:
    """The ring law starts from the most workers that were measured."""
    four = Setting(device="cpu", workers=4, threads=1)
    machine = make_machine()
    machine = msgspec.structs.replace(
        machine, collectives=(*machine.collectives, make_collective(four, 0.0, 1e6))
    )
    cost = collective_seconds(machine, "all_reduce", 1 << 20, Setting(device="cpu", workers=8))
    assert cost.note.endswith("from 4 workers")


def test_a_missing_broadcast_costs_an_all_reduce() -> None:
    """An upper bound stands in, and says so."""
    machine = msgspec.structs.replace(make_machine(), collectives=(make_collective(TWO, 0.0, 1e9),))
    cost = collective_seconds(machine, "broadcast", 1 << 20, TWO)
    assert cost.seconds == pytest.approx((1 << 20) / 1e9)
    assert cost.note == "broadcast was not measured: assumed as all_reduce"


def test_no_collectives_are_an_error() -> None:
    """Several workers cannot be predicted from a profile of one."""
    machine = msgspec.structs.replace(make_machine(), collectives=())
    with pytest.raises(MachineError) as error:
        collective_seconds(machine, "all_reduce", 1, TWO)
    assert str(error.value) == (
        "wanted the time of all_reduce over 2 workers (cpu), got a profile whose collectives are: none "
        "(test); run `ridgeline measure` where several workers can start"
    )


def test_ring_latency_of_a_table() -> None:
    """The part that does not depend on the size is found from a table with both."""
    table = [(float(1 << k), 2e-3 + (1 << k) / 1e9) for k in range(0, 31, 2)]
    assert ring_latency(table) == pytest.approx(2e-3, rel=0.01)
    assert ring_latency([(1.0, 5.0)]) == 5.0


def test_one_point_tables_grow_with_the_size() -> None:
    """With a single measured size time is proportional above it and constant below."""
    entry = Collective(
        setting=TWO,
        operation="all_reduce",
        backend="gloo",
        table=(SizePoint(num_bytes=1000, seconds=measured(1.0, "s")),),
    )
    machine = msgspec.structs.replace(make_machine(), collectives=(entry,))
    assert collective_seconds(machine, "all_reduce", 2000, TWO).seconds == 2.0
    assert collective_seconds(machine, "all_reduce", 10, TWO).seconds == 1.0
