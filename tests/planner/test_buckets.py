"""Bucket cuts: properties of `cut_buckets`, and the search against trying everything."""

import itertools
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from chained_workloads import make_chain
from ridgeline.machine import Quantity
from ridgeline.plan import Execution, Plan, Sync, cut_buckets
from ridgeline.planner import choose
from ridgeline.planner.exchanges.buckets import (
    SLACK,
    Slowdown,
    best_cuts,
    last_end_s,
    quickest_cuts,
    searched_bucket_bytes,
)
from ridgeline.simulator.pricing.pieces import cut_workload
from ridgeline.simulator.step import simulate
from strategies import make_machine, make_workload

gradients = st.lists(
    st.tuples(st.integers(1, 1000), st.sampled_from(("float32", "bfloat16"))), max_size=30
)
limits = st.lists(st.integers(1, 3000), min_size=1, max_size=5)
TIE = 1e-9
"""Ends that are apart by less, as a share of them, are equal but for rounding."""


@given(gradients, limits)
def test_buckets_partition_the_gradients(
    sizes: Sequence[tuple[int, str]], bucket_bytes: Sequence[int]
) -> None:
    """Every gradient is in exactly one bucket, in ready order, with its own dtype only."""
    cuts = cut_buckets(sizes, bucket_bytes)
    assert sorted(index for cut in cuts for index in cut) == list(range(len(sizes)))
    for cut in cuts:
        assert cut == tuple(sorted(cut))
        assert len({sizes[index][1] for index in cut}) == 1
    for dtype in ("float32", "bfloat16"):
        in_order = [index for cut in cuts if sizes[cut[0]][1] == dtype for index in cut]
        assert in_order == sorted(in_order)


@given(gradients, limits)
def test_closed_buckets_hold_their_limit(
    sizes: Sequence[tuple[int, str]], bucket_bytes: Sequence[int]
) -> None:
    """Only what is open at the end is below its limit: at most one bucket a dtype."""
    cuts = cut_buckets(sizes, bucket_bytes)
    small = [
        sizes[cut[-1]][1]
        for number, cut in enumerate(cuts)
        if sum(sizes[i][0] for i in cut) < bucket_bytes[min(number, len(bucket_bytes) - 1)]
    ]
    assert len(small) == len(set(small))


@given(gradients.map(lambda sizes: [(size, "float32") for size, _ in sizes]), limits)
def test_no_bucket_could_close_earlier(
    sizes: Sequence[tuple[int, str]], bucket_bytes: Sequence[int]
) -> None:
    """Of one dtype, a bucket without its last gradient is below its limit."""
    for number, cut in enumerate(cut_buckets(sizes, bucket_bytes)):
        limit = bucket_bytes[min(number, len(bucket_bytes) - 1)]
        assert sum(sizes[i][0] for i in cut[:-1]) < limit


def _end(
    lengths: Sequence[int], sizes: Sequence[int], ready: Sequence[float], seconds, factor: float = 1
) -> float:
    """Of the last bucket, where a collective takes `factor` times as long until the last gradient is ready."""
    at, end = 0, 0.0
    for length in lengths:
        start, own = max(ready[at + length - 1], end), seconds(sum(sizes[at : at + length]))
        beside = min(own, max(0.0, ready[-1] - start) / factor)
        end = start + factor * beside + own - beside
        at += length
    return end


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 10)), min_size=1, max_size=7),
    st.floats(0, 20),
    st.floats(0.01, 2),
    st.sampled_from((1.0, 1.3, 3.0)),
)
@example(
    [
        (19, 0.0),
        (1, 1.6242536538695198),
        (1, 4.016362360985392),
        (32, 9.637932075440556),
        (100, 10.0),
        (100, 1.01),
    ],
    0.0,
    2.0,
    1.3,
)  # fmt: skip - two cuts end together but for rounding
def test_the_search_finds_the_best_cuts(
    steps: Sequence[tuple[int, float]], latency: float, per_byte: float, factor: float
) -> None:
    """No way of cutting ends earlier, and none that ends as early, but for rounding, has fewer buckets."""
    sizes = [size for size, _ in steps]
    ready = list(itertools.accumulate(step for _, step in steps))
    seconds = lambda num_bytes: latency + per_byte * num_bytes  # noqa: E731 - a cost model
    slowdown = Slowdown(communication=factor)
    found = best_cuts(sizes, ready, seconds, slack=TIE, slowdown=slowdown)
    assert sum(found) == len(sizes)
    ways = [
        [b - a for a, b in itertools.pairwise((0, *inner, len(sizes)))]
        for count in range(len(sizes))
        for inner in itertools.combinations(range(1, len(sizes)), count)
    ]
    ends = {tuple(way): _end(way, sizes, ready, seconds, factor) for way in ways}
    assert ends[found] == pytest.approx(min(ends.values()))
    earliest = min(ends.values())
    fewest = min(len(way) for way, end in ends.items() if end <= earliest * (1 + TIE / 10))
    assert len(found) <= fewest


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0.1, 10)), min_size=1, max_size=12),
    st.floats(0.1, 2),
    st.builds(Slowdown, st.floats(1, 2), st.floats(1, 3)),
)
def test_cuts_for_what_slows_end_no_later(
    steps: Sequence[tuple[int, float]], per_byte: float, slowdown: Slowdown
) -> None:
    """Than those that know nothing of it, on a clock on which both sides are slowed."""
    sizes = [size for size, _ in steps]
    ready = list(itertools.accumulate(step for _, step in steps))
    case = (sizes, ready, lambda num_bytes: 1.0 + per_byte * num_bytes)
    found = last_end_s(quickest_cuts(*case, slowdown), *case, slowdown)
    assert found <= last_end_s(best_cuts(*case), *case, slowdown)


def test_a_slowed_collective_leaves_less_for_the_end() -> None:
    """What would be sent just in time is late where sending beside backward takes longer."""
    case = ([5, 20, 10], [5.0, 15.0, 45.0], lambda num_bytes: 1.0 + num_bytes)
    slowdown = Slowdown(1.05, 1.5)
    late, found = best_cuts(*case), quickest_cuts(*case, slowdown)
    ends = [last_end_s(cuts, *case, slowdown) for cuts in (late, found)]
    assert (late, found) == ((2, 1), (1, 1, 1))
    assert ends[1] < ends[0] * (1 - SLACK)


def test_latency_alone_makes_one_bucket() -> None:
    """When only latency counts and all is ready at once, one bucket is best."""
    assert best_cuts([1, 1, 1], [1.0, 1.0, 1.0], lambda _: 5.0) == (3,)


def test_bandwidth_alone_makes_the_last_bucket_small() -> None:
    """Without latency the last gradient travels by itself as soon as it is ready."""
    found = best_cuts([10] * 4, [10.0, 20.0, 30.0, 40.0], lambda n: n * 1.0, slack=0.0)
    assert found[-1] == 1


def test_limits_reproduce_the_cuts_and_beat_the_default() -> None:
    """`cut_buckets` with the searched limits cuts where the search did, and the step is shorter."""
    machine = make_machine(latency_s=1e-4, bandwidth=1e9)
    workload = make_workload(backward=[5_000_000] * 12, gradient_bytes=[3 << 20] * 12)
    plan = Plan(workers=2, threads=1)
    limits = searched_bucket_bytes(machine, workload, plan)
    assert limits is not None
    cuts = cut_workload(workload, Sync(bucket_bytes=limits))
    assert tuple(cut.num_bytes for cut in cuts) == limits
    searched = msgspec.structs.replace(plan, sync=Sync(bucket_bytes=limits))
    one = msgspec.structs.replace(plan, sync=Sync(bucket_bytes=(36 << 20,)))
    steps = [simulate(machine, workload, p).step_ns for p in (searched, plan, one)]
    assert steps[0] < min(steps[1:])


@pytest.mark.parametrize("execution", ["eager", "compiled", "regional"])
def test_cutting_pays_in_every_mode_that_is_called(execution: Execution) -> None:
    """A compiled step is cut in parts, so its gradients do not wait for its end."""
    machine = make_machine(latency_s=1e-4, bandwidth=1e9)
    workload = make_chain((2,) * 12, elements=1 << 20, flops=20_000_000)
    limits = searched_bucket_bytes(
        machine, workload, Plan(workers=2, threads=1, execution=execution)
    )
    assert limits is not None
    assert len(limits) > 1


def test_a_replayed_backward_hands_out_gradients_when_they_are_ready() -> None:
    """On a GPU cutting pays in a compiled step as well."""
    machine = make_machine(device="cuda", latency_s=1e-4, bandwidth=1e9)
    workload = make_chain((2,) * 12, elements=1 << 20, flops=20_000_000, device="cuda")
    for execution in ("graph", "compiled+graph"):
        limits = searched_bucket_bytes(machine, workload, Plan(workers=2, execution=execution))
        assert limits is not None
        assert len(limits) > 1


def test_many_gradients_are_joined_first() -> None:
    """A thousand gradients are cut too, in groups, and the limits still reproduce the cuts."""
    workload = make_workload(backward=[100_000] * 1000, gradient_bytes=[10_000] * 1000)
    limits = searched_bucket_bytes(
        make_machine(latency_s=1e-4), workload, Plan(workers=2, threads=1)
    )
    assert limits is not None
    assert sum(limits) == 10_000_000


def test_nothing_to_cut() -> None:
    """One gradient, or interleaved dtypes, leave nothing to search."""
    machine, plan = make_machine(), Plan(workers=2, threads=1)
    assert searched_bucket_bytes(machine, make_workload(gradient_bytes=[8]), plan) is None
    workload = make_workload()
    mixed = msgspec.structs.replace(
        workload,
        parameters=(
            msgspec.structs.replace(workload.parameters[0], dtype="bfloat16"),
            *workload.parameters[1:],
        ),
    )
    assert searched_bucket_bytes(machine, mixed, plan) is None


@pytest.mark.parametrize(
    ("gain", "is_one"), [(0.9, True), (1.2, True), (1.5, False), (None, False)]
)
def test_nothing_is_cut_where_messages_take_from_computing(
    gain: float | None, is_one: bool
) -> None:
    """As on the cores of one host; unless nobody knows, or the user has set a cut."""
    machine = make_machine(latency_s=1e-4, bandwidth=1e9)
    found = None if gain is None else Quantity.measured([gain], "x")
    overlaps = tuple(msgspec.structs.replace(one, gain=found) for one in machine.overlaps)
    machine = msgspec.structs.replace(machine, overlaps=overlaps)
    workload = make_workload(backward=[5_000_000] * 12, gradient_bytes=[3 << 20] * 12)

    def compared(**fixed: object) -> set[tuple[int, ...]]:
        ranking = choose(machine, {2: workload}, fixed={"execution": "eager", **fixed})
        assert {c.plan.workers for c in ranking.candidates} == {2}
        return {c.plan.sync.bucket_bytes for c in ranking.candidates}

    assert (compared() == {(36 << 20,)}) is is_one
    assert compared(bucket_bytes=1 << 20) == {(1 << 20,)}
