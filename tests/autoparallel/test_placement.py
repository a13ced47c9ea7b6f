"""Fixed numbers of workers: lists for threads, HEFT for devices, against brute force."""

import pytest
from dag_strategies import dags, shortest_makespan
from hypothesis import given
from hypothesis import strategies as st
from placement_check import check_placement

from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.scheduling.list_schedule import list_schedule
from ridgeline.autoparallel.scheduling.makespan import NodeCost, find_bounds, run_schedule
from ridgeline.autoparallel.scheduling.placement import Placement, place
from ridgeline.autoparallel.scheduling.schedule import check_schedule
from ridgeline.errors import ScheduleError

DIAMOND = Dag.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])


def durations(dag: Dag, data: st.DataObject) -> list[float]:
    return [float(data.draw(st.integers(1, 9))) for _ in range(dag.num_nodes)]


def list_makespan(dag: Dag, seconds: list[float], num_lanes: int, sync_s: float = 0.0) -> float:
    schedule = list_schedule(dag, seconds, num_lanes, sync_s=sync_s)
    check_schedule(dag, schedule)
    assert schedule.num_lanes <= num_lanes
    # So little of a device that lanes do not share it.
    costs = [NodeCost(s, 0.01) for s in seconds]
    return run_schedule(costs, schedule, sync_s=sync_s).makespan


@given(dags(6), st.data())
def test_a_list_schedule_is_within_grahams_bound_of_the_best(dag: Dag, data: st.DataObject) -> None:
    """At most 2 - 1/P times the optimum, found by trying everything."""
    seconds = durations(dag, data)
    lanes = data.draw(st.integers(1, 3))
    best = shortest_makespan(dag, seconds, lanes)
    found = list_makespan(dag, seconds, lanes)
    assert best <= found <= (2 - 1 / lanes) * best


@given(dags(40), st.data())
def test_a_list_schedule_is_within_grahams_bound_of_work_and_chain(
    dag: Dag, data: st.DataObject
) -> None:
    """On larger graphs: work / P + (1 - 1/P) x longest chain, which Graham's proof gives."""
    seconds = durations(dag, data)
    lanes = data.draw(st.integers(1, 8))
    limits = find_bounds(dag, [NodeCost(s) for s in seconds], num_devices=lanes)
    found = list_makespan(dag, seconds, lanes)
    assert limits.limit_s * (1 - 1e-9) <= found
    assert found <= (limits.work_s + (1 - 1 / lanes) * limits.critical_path_s) * (1 + 1e-9)


@given(dags(20), st.data())
def test_list_schedules_that_know_the_cost_of_a_sync_stay_valid(
    dag: Dag, data: st.DataObject
) -> None:
    """Edges are kept, and the time is at least the bound."""
    seconds = durations(dag, data)
    limits = find_bounds(dag, [NodeCost(s) for s in seconds], num_devices=2)
    assert list_makespan(dag, seconds, 2, sync_s=0.5) >= limits.limit_s * (1 - 1e-9)


def test_two_chains_stay_on_their_threads() -> None:
    """Independent chains need no sync, also where the second becomes the more urgent one."""
    dag = Dag.of(10, [(u, u + 2) for u in range(8)])
    seconds = [2.0, 1.0, 1.0, 1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 3.0]
    schedule = list_schedule(dag, seconds, 2)
    assert schedule.syncs == ()
    assert set(schedule.nodes_by_lane()) == {(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)}


def test_a_node_joins_the_lane_that_it_waited_for_last() -> None:
    """Both lanes are idle when two nodes become ready; the more urgent one stays where its value is."""
    dag = Dag.of(4, [(0, 2), (1, 3)])
    schedule = list_schedule(dag, [2.0, 2.0, 1.0, 2.0], 2)
    assert schedule.lane_of == (1, 0, 1, 0)
    schedule = list_schedule(Dag.of(4, [(0, 3), (1, 2)]), [1.0, 1.0, 1.0, 1.0], 2)
    assert schedule.syncs == ()


def test_the_most_urgent_node_goes_first() -> None:
    """What the longest chain waits for is issued before what nothing waits for."""
    dag = Dag.of(5, [(2, 3), (3, 4)])
    schedule = list_schedule(dag, [1.5, 1.0, 1.0, 1.0, 1.0], 1)
    assert schedule.order == (2, 3, 0, 1, 4)


def test_lanes_that_nothing_runs_on_are_left_out() -> None:
    """A chain needs one lane, whatever is offered."""
    chain = Dag.of(3, [(0, 1), (1, 2)])
    assert list_schedule(chain, [1.0] * 3, 8).lanes == ("compute:0",)
    assert list_schedule(Dag(0, ()), [], 8).lanes == ()


def test_independent_work_is_spread_over_equal_devices() -> None:
    """Two devices take half of the time, and nothing is copied."""
    dag = Dag(10, ())
    found = place(dag, [[1.0] * 10] * 2, {}, lambda source, target, size: 1.0, {})
    assert (found.makespan, len(set(found.device_of)), found.transfers) == (5.0, 2, ())


def test_a_value_goes_once_to_each_device_that_reads_it() -> None:
    """Two readers on another device share one copy, which is there before they start."""
    dag = Dag.of(3, [(0, 1), (0, 2)])
    sizes = {(0, 1): 100, (0, 2): 60}
    pinned = {0: 0, 1: 1, 2: 1}
    found = place(dag, [[1.0, 0.5, 0.5]] * 2, sizes, lambda a, b, size: size / 100, pinned)
    assert [(t.node, t.source, t.target, t.num_bytes) for t in found.transfers] == [(0, 0, 1, 100)]
    assert found.starts == (0.0, 2.0, 2.5)


def test_an_edge_without_bytes_only_orders() -> None:
    """Nothing is copied for it."""
    dag = Dag.of(2, [(0, 1)])
    found = place(dag, [[1.0] * 2] * 2, {}, lambda a, b, size: 9.0, {0: 0, 1: 1})
    assert (found.starts, found.transfers) == ((0.0, 1.0), ())


def test_copies_on_one_link_wait_for_each_other() -> None:
    """Two values that are ready at once arrive one after the other; links of their own do not wait."""
    dag = Dag.of(4, [(0, 2), (1, 2), (2, 3)])
    sizes = {(0, 2): 1, (1, 2): 1}
    costs = [[0.0, 0.0, 1.0, 1.0]] * 3
    same = place(dag, costs, sizes, lambda a, b, size: 2.0, {0: 0, 1: 0, 2: 2, 3: 2})
    assert same.starts[2] == 4.0
    apart = place(dag, costs, sizes, lambda a, b, size: 2.0, {0: 0, 1: 1, 2: 2, 3: 2})
    assert apart.starts[2] == 2.0


def test_a_short_node_is_inserted_into_a_gap() -> None:
    """While a device waits for a copy it runs what is ready, though that is less urgent."""
    dag = Dag.of(4, [(0, 1), (1, 2)])
    sizes = {(0, 1): 1}
    costs = [[1.0, 5.0, 5.0, 1.0], [9.0, 1.0, 5.0, 1.0]]
    pinned = {0: 0, 1: 1, 2: 1, 3: 1}
    found = place(dag, costs, sizes, lambda a, b, size: 2.0, pinned)
    assert found.starts == (0.0, 3.0, 4.0, 0.0)


def test_slow_links_keep_everything_on_one_device() -> None:
    """Never worse than one device, also where spreading looked good until the results had to meet."""
    found = place(DIAMOND, [[1.0] * 4] * 2, dict.fromkeys(DIAMOND.edges, 1), lambda *_: 50.0, {})
    assert (found.makespan, len(set(found.device_of))) == (4.0, 1)
    join = Dag.of(3, [(0, 2), (1, 2)])
    found = place(join, [[1.0] * 3] * 2, dict.fromkeys(join.edges, 1), lambda *_: 50.0, {})
    assert (found.makespan, len(set(found.device_of))) == (3.0, 1)


@given(dags(6), st.data())
def test_placements_keep_edges_pins_and_bounds(dag: Dag, data: st.DataObject) -> None:
    """Valid on any graph, never better than the bounds or the optimum without copies."""
    num_devices = data.draw(st.integers(1, 3))
    seconds = durations(dag, data)
    costs = [seconds] * num_devices
    sizes = {edge: data.draw(st.integers(0, 3)) for edge in dag.edges}
    nodes = st.integers(0, max(0, dag.num_nodes - 1))
    pins = st.dictionaries(nodes, st.integers(0, num_devices - 1), max_size=min(3, dag.num_nodes))
    pinned = data.draw(pins)
    found = place(dag, costs, sizes, lambda a, b, size: 0.5 * size, pinned)
    check_placement(dag, found, costs, sizes)
    assert all(found.device_of[node] == device for node, device in pinned.items())
    node_costs = [NodeCost(s) for s in seconds]
    limits = find_bounds(dag, node_costs, num_devices=num_devices, transfers=found.transfers)
    assert found.makespan >= limits.limit_s * (1 - 1e-9)
    assert found.makespan >= shortest_makespan(dag, seconds, num_devices) * (1 - 1e-9)
    if not pinned:
        assert found.makespan <= sum(seconds)


def test_a_placement_without_its_transfer_is_refused() -> None:
    """The check names the value that is not there."""
    dag = Dag.of(2, [(0, 1)])
    wrong = Placement((0, 1), (0.0, 1.0), (1.0, 2.0), ())
    with pytest.raises(ScheduleError) as error:
        check_placement(dag, wrong, [[1.0] * 2] * 2, {(0, 1): 8})
    assert str(error.value) == (
        "wanted node 1 to start when the value of node 0 is there, at inf s, got 1 s on device 1; add or "
        "move the transfer"
    )


def test_a_device_used_twice_at_once_is_refused() -> None:
    """The check names the device."""
    wrong = Placement((0, 0), (0.0, 0.5), (1.0, 1.5), ())
    with pytest.raises(ScheduleError) as error:
        check_placement(Dag(2, ()), wrong, [[1.0] * 2], {})
    assert str(error.value) == (
        "wanted one thing at a time on device 0, got one until 1 s and the next from 0.5 s; place it again"
    )


def test_missing_costs_and_unknown_devices_are_refused() -> None:
    """Before anything is placed."""
    with pytest.raises(ScheduleError) as error:
        place(DIAMOND, [[1.0] * 3], {}, lambda *_: 0.0, {})
    assert str(error.value) == (
        "wanted the costs of 4 nodes on at least one device, got [3]; give costs_by_device[device][node]"
    )
    with pytest.raises(ScheduleError) as error:
        place(DIAMOND, [[1.0] * 4], {}, lambda *_: 0.0, {1: 1})
    assert str(error.value) == (
        "wanted pinned nodes below 4 on devices below 1, got node 1 on device 1; pin nodes of this graph "
        "to devices that have costs"
    )
