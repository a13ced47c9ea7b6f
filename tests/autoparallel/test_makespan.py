"""The clock of schedules, the lower bounds, and merging of lanes by what the clock says."""

import itertools

import pytest
from dag_strategies import dags
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.scheduling.chains import assign_chains, share_lanes
from ridgeline.autoparallel.scheduling.makespan import Bounds, NodeCost, find_bounds, run_schedule
from ridgeline.autoparallel.scheduling.merging import merge_lanes
from ridgeline.autoparallel.scheduling.placement import Transfer
from ridgeline.autoparallel.scheduling.schedule import (
    check_schedule,
    in_program_order,
    serial_schedule,
)

PAIR = Dag(2, ())
SIDE_BY_SIDE = in_program_order((0, 1), ())
DIAMOND = Dag.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
TWO_LANES = in_program_order((0, 0, 1, 0), ((0, 2), (2, 3)))

costs_of = st.builds(
    NodeCost,
    st.floats(1e-6, 1.0, allow_nan=False),
    st.floats(0.05, 1.0, allow_nan=False),
)


def test_small_nodes_run_side_by_side_for_nothing() -> None:
    """As long as they fill the device less than once they do not notice each other."""
    times = run_schedule([NodeCost(3.0, 0.5), NodeCost(2.0, 0.5)], SIDE_BY_SIDE)
    assert times.ends == (3.0, 2.0)


def test_nodes_that_fill_the_device_share_it() -> None:
    """Both slow down until the shorter one ends; the rest of the longer one runs at full speed."""
    times = run_schedule([NodeCost(3.0), NodeCost(1.0)], SIDE_BY_SIDE)
    assert times.ends == (4.0, 2.0)


def test_a_sync_costs_time_and_a_lane_does_not() -> None:
    """A diamond of unit nodes: two syncs on the way through the second lane."""
    costs = [NodeCost(1.0, 0.5)] * 4
    times = run_schedule(costs, TWO_LANES, sync_s=0.25)
    assert times.starts == (0.0, 1.0, 1.25, 2.5)
    assert times.makespan == 3.5


def test_nodes_that_start_later_slow_down_those_that_run() -> None:
    """Three full nodes that start one second apart share by what is left of each; no work is lost."""
    apart = in_program_order((0, 1, 2, 0, 1, 2), ())
    # The third pause is slowed down as well, from its second second on.
    costs = [NodeCost(s, 0.0) for s in (1.0, 2.0, 2.5)] + [NodeCost(s) for s in (3.0, 3.0, 1.0)]
    times = run_schedule(costs, apart)
    assert times.starts[3:] == (1.0, 2.0, 3.0)
    assert times.ends[3:] == pytest.approx((7.0, 8.0, 6.0))


@given(dags(15), st.data())
def test_no_schedule_beats_the_bounds_and_order_is_kept(dag: Dag, data: st.DataObject) -> None:
    """Shared lanes: every node after its parents, lanes one at a time, and no less than the limit."""
    costs = [data.draw(costs_of) for _ in range(dag.num_nodes)]
    sync_s = data.draw(st.sampled_from((0.0, 1e-3)))
    schedule = share_lanes(dag, assign_chains(dag))
    times = run_schedule(costs, schedule, sync_s=sync_s)
    for u, v in dag.edges:
        assert times.starts[v] >= times.ends[u]
    for u, v in schedule.syncs:
        assert times.starts[v] >= times.ends[u] + sync_s
    for nodes in schedule.nodes_by_lane():
        for before, node in itertools.pairwise(nodes):
            assert times.starts[node] >= times.ends[before]
    assert times.makespan >= find_bounds(dag, costs).limit_s * (1 - 1e-9)
    serial_s = sum(cost.seconds for cost in costs)
    serial = run_schedule(costs, serial_schedule(dag), sync_s=sync_s)
    assert serial.makespan == pytest.approx(serial_s)


@given(dags(15), st.data())
def test_full_nodes_gain_nothing_from_lanes(dag: Dag, data: st.DataObject) -> None:
    """Where every node fills the device, any schedule without syncs that cost is as long as the work."""
    costs = [NodeCost(data.draw(costs_of).seconds) for _ in range(dag.num_nodes)]
    times = run_schedule(costs, assign_chains(dag))
    assert times.makespan == pytest.approx(sum(cost.seconds for cost in costs))


def test_no_schedule_is_shorter_than_the_largest_bound() -> None:
    """The longest chain, the work over the devices with what it fills, and the busiest link."""
    costs = [NodeCost(1.0, 0.5), NodeCost(2.0, 0.5), NodeCost(4.0, 0.5), NodeCost(1.0, 0.5)]
    assert find_bounds(DIAMOND, costs) == Bounds(critical_path_s=6.0, work_s=4.0)
    copies = [Transfer(0, 0, 1, 8, 0.0, 5.0), Transfer(1, 0, 1, 8, 5.0, 9.0)]
    bounds = find_bounds(DIAMOND, costs, num_devices=2, transfers=copies)
    assert bounds == Bounds(critical_path_s=6.0, work_s=2.0, link_s=9.0)
    assert bounds.limit_s == 9.0
    assert find_bounds(Dag(0, ()), []).limit_s == 0.0


def test_lanes_of_full_nodes_are_merged_into_one() -> None:
    """Where the device is full anyway, a lane of its own only costs syncs."""
    shared = share_lanes(DIAMOND, assign_chains(DIAMOND))
    merged = merge_lanes(DIAMOND, shared, [NodeCost(1.0)] * 4, most_lanes=8, sync_s=0.1)
    assert merged == in_program_order((0, 0, 0, 0), ())


def test_lanes_that_gain_are_kept() -> None:
    """Long small nodes stay side by side, cheap syncs notwithstanding."""
    shared = share_lanes(DIAMOND, assign_chains(DIAMOND))
    costs = [NodeCost(1.0, 0.3)] * 4
    assert merge_lanes(DIAMOND, shared, costs, most_lanes=8, sync_s=0.1) == shared


def test_the_short_branch_joins_another() -> None:
    """Of three branches, the two that fit beside the long one share a lane."""
    dag = Dag.of(5, [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4)])
    costs = [NodeCost(s, 0.3) for s in (1.0, 4.0, 2.0, 1.0, 1.0)]
    merged = merge_lanes(dag, assign_chains(dag), costs, most_lanes=8, sync_s=0.01)
    assert merged.num_lanes == 2
    assert merged.lane_of[2] == merged.lane_of[3] != merged.lane_of[1]


@given(dags(15), st.data())
def test_merging_never_makes_the_prediction_worse(dag: Dag, data: st.DataObject) -> None:
    """With as many lanes as it likes; with fewer it has no more than allowed; always valid."""
    costs = [data.draw(costs_of) for _ in range(dag.num_nodes)]
    sync_s = data.draw(st.sampled_from((0.0, 1e-3, 0.1)))
    shared = share_lanes(dag, assign_chains(dag))
    before = run_schedule(costs, shared, sync_s=sync_s).makespan
    merged = merge_lanes(dag, shared, costs, most_lanes=99, sync_s=sync_s)
    check_schedule(dag, merged)
    after = run_schedule(costs, merged, sync_s=sync_s).makespan
    assert after <= before * (1 + 1e-6)
    most = data.draw(st.integers(1, 3))
    fewer = merge_lanes(dag, shared, costs, most_lanes=most, sync_s=sync_s)
    assert fewer.num_lanes <= most
    check_schedule(dag, fewer)


def test_very_many_lanes_are_folded_to_what_is_allowed() -> None:
    """A thousand independent nodes end up on at most eight lanes of about equal length."""
    dag = Dag(1_000, ())
    costs = [NodeCost(1.0, 0.125)] * 1_000
    merged = merge_lanes(dag, assign_chains(dag), costs, most_lanes=8, sync_s=0.0)
    assert merged.num_lanes == 8
    assert run_schedule(costs, merged).makespan == pytest.approx(125.0)
