"""What a schedule says, which syncs it needs, and what is refused."""

import itertools

import msgspec
import pytest
from dag_strategies import closure, dags
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.scheduling.schedule import (
    Schedule,
    check_schedule,
    in_program_order,
    needed_syncs,
    serial_schedule,
)
from ridgeline.errors import ScheduleError

DIAMOND = Dag.of(4, [(0, 1), (0, 2), (1, 3), (2, 3)])
TWO_LANES = in_program_order((0, 0, 1, 0), ((0, 2), (2, 3)))


def test_a_schedule_tells_lanes_waits_and_events() -> None:
    """What an executor asks for, of a diamond on two lanes."""
    assert TWO_LANES.lanes == ("compute:0", "compute:1")
    assert TWO_LANES.nodes_by_lane() == ((0, 1, 3), (2,))
    assert TWO_LANES.waits() == {2: (0,), 3: (2,)}
    assert TWO_LANES.signals() == {0, 2}
    assert repr(TWO_LANES) == "Schedule(4 nodes on 2 lanes, 2 syncs, 2 events)"


def test_a_serial_schedule_has_one_lane_and_no_sync() -> None:
    """It is valid whatever the graph; nothing at all needs no lane."""
    check_schedule(DIAMOND, serial_schedule(DIAMOND))
    assert serial_schedule(DIAMOND).syncs == ()
    assert serial_schedule(Dag(0, ())).lanes == ()


@given(dags(12), st.data())
def test_needed_syncs_are_enough_and_none_is_too_many(dag: Dag, data: st.DataObject) -> None:
    """On any lanes and in any topological order; without one of them an edge is lost."""
    lane_of = data.draw(st.lists(st.integers(0, 3), min_size=dag.num_nodes, max_size=dag.num_nodes))
    order = _topological_order(dag, data)
    syncs = needed_syncs(dag, lane_of, order)
    schedule = Schedule(
        lanes=tuple("abcd"), lane_of=tuple(lane_of), order=tuple(order), syncs=syncs
    )
    check_schedule(dag, schedule)
    for sync in syncs:
        fewer = msgspec.structs.replace(schedule, syncs=tuple(s for s in syncs if s != sync))
        with pytest.raises(ScheduleError):
            check_schedule(dag, fewer)


@given(dags(10), st.data())
def test_a_schedule_is_refused_exactly_when_an_edge_is_not_implied(
    dag: Dag, data: st.DataObject
) -> None:
    """The check agrees with Warshall's closure of lanes and syncs."""
    lane_of = data.draw(st.lists(st.integers(0, 2), min_size=dag.num_nodes, max_size=dag.num_nodes))
    syncs = tuple(edge for edge in dag.edges if data.draw(st.booleans()))
    schedule = in_program_order(tuple(lane_of), syncs)
    steps = [step for nodes in schedule.nodes_by_lane() for step in itertools.pairwise(nodes)]
    implied = closure(dag.num_nodes, [*steps, *syncs])
    if set(dag.edges) <= implied:
        check_schedule(dag, schedule)
    else:
        with pytest.raises(ScheduleError, match="nothing orders"):
            check_schedule(dag, schedule)


def test_a_missing_sync_is_named() -> None:
    """The message names both nodes and their lanes."""
    with pytest.raises(ScheduleError) as error:
        check_schedule(DIAMOND, msgspec.structs.replace(TWO_LANES, syncs=((0, 2),)))
    assert str(error.value) == (
        "wanted node 3 to wait for node 2, got a schedule in which nothing orders 2 (compute:1) before "
        "3 (compute:0); add a sync (2, 3)"
    )


def test_a_sync_on_what_is_issued_later_is_refused() -> None:
    """An event that is not recorded yet would not be waited for."""
    with pytest.raises(ScheduleError) as error:
        check_schedule(DIAMOND, msgspec.structs.replace(TWO_LANES, order=(0, 1, 3, 2)))
    assert str(error.value) == (
        "wanted syncs (u, v) that wait for a node issued earlier, got (2, 3) among 4 nodes; put 2 before "
        "3 in the order"
    )


def test_an_order_or_lanes_of_another_graph_are_refused() -> None:
    """Nodes missing from the order, or on lanes that do not exist."""
    with pytest.raises(ScheduleError) as error:
        check_schedule(DIAMOND, msgspec.structs.replace(TWO_LANES, order=(0, 1, 2)))
    assert str(error.value) == (
        "wanted an order of all 4 nodes, each once, got 3 entries that are not; schedule the graph that "
        "is run"
    )
    with pytest.raises(ScheduleError) as error:
        check_schedule(DIAMOND, msgspec.structs.replace(TWO_LANES, lane_of=(0, 0, 2, 0)))
    assert str(error.value) == (
        "wanted one of 2 lanes for each of 4 nodes, got 4 lanes [0, 2]; assign the graph that is run"
    )


def test_syncs_for_an_order_that_is_not_topological_are_refused() -> None:
    """No sync can mend an order that issues a node too early."""
    with pytest.raises(ScheduleError) as error:
        needed_syncs(DIAMOND, (0, 0, 1, 0), (1, 0, 2, 3))
    assert str(error.value) == (
        "wanted an order that issues node 0 before node 1, which waits for it, got positions 1 and 0; "
        "sort the nodes topologically"
    )


def _topological_order(dag: Dag, data: st.DataObject) -> list[int]:
    parents = dag.parents()
    left = set(range(dag.num_nodes))
    order: list[int] = []
    while left:
        ready = sorted(node for node in left if not left.intersection(parents[node]))
        node = data.draw(st.sampled_from(ready))
        order.append(node)
        left.remove(node)
    return order
