"""Candidates by prediction, the choice by measurement."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.autoparallel.graphs.dag import Dag
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.autoparallel.scheduling.schedule import check_schedule
from ridgeline.autoparallel.selection import candidates, choose


def branches(width: int, depth: int) -> Dag:
    """A source, `width` chains of `depth` nodes, and a sink."""
    edges: list[tuple[int, int]] = []
    last = width * depth + 1
    for branch in range(width):
        nodes = [0, *(1 + branch * depth + index for index in range(depth)), last]
        edges += itertools.pairwise(nodes)
    return Dag.of(last + 1, edges)


def test_independent_parts_that_leave_room_get_lanes() -> None:
    """Six branches of small operations: serial, a lane for each, and fewer by merging, all different."""
    graph = branches(6, 3)
    costs = [NodeCost(1e-5, 0.2)] * graph.num_nodes
    found = candidates(graph, costs, 8)
    assert next(iter(found)) == "serial"
    assert found["concurrent"].num_lanes == 6
    assert {schedule.num_lanes for schedule in found.values()} > {1, 2, 6}
    assert len({schedule.lane_of for schedule in found.values()}) == len(found)


def test_no_more_lanes_than_allowed() -> None:
    """`most_lanes` bounds every candidate; one lane leaves the serial one only."""
    graph = branches(6, 3)
    costs = [NodeCost(1e-5, 0.2)] * graph.num_nodes
    assert max(schedule.num_lanes for schedule in candidates(graph, costs, 3).values()) <= 3
    assert list(candidates(graph, costs, 1)) == ["serial"]


def test_a_chain_has_one_candidate() -> None:
    """Where nothing is independent nothing but the serial schedule is measured."""
    graph = Dag.of(4, [(0, 1), (1, 2), (2, 3)])
    assert list(candidates(graph, [NodeCost(1e-5)] * 4, 8)) == ["serial"]


@settings(max_examples=100)
@given(st.integers(1, 9), st.data())
def test_all_candidates_keep_every_edge(count: int, data: st.DataObject) -> None:
    """Whatever the graph, each candidate is a valid schedule of it."""
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = data.draw(st.sets(st.sampled_from(pairs), max_size=12)) if pairs else set()
    graph = Dag.of(count, edges)
    fills = data.draw(st.lists(st.floats(0.05, 1.0), min_size=count, max_size=count))
    for schedule in candidates(graph, [NodeCost(1e-5, fill) for fill in fills], 8).values():
        check_schedule(graph, schedule)


def test_the_fastest_measured_is_chosen() -> None:
    """Not the predicted one: what counts is the median of the turns."""
    choice = choose(
        {"serial": [2.0, 2.1, 2.0], "2 lanes": [1.0, 1.1, 1.0], "4 lanes": [1.2, 1.2, 1.2]}
    )
    assert choice.name == "2 lanes"
    assert choice.times_faster == pytest.approx(2.0, rel=0.05)
    assert (
        choice.reason
        == "2 lanes is the fastest measured: 1.00 s against 2.00 s serially, 2.00 times faster"
    )


def test_a_slower_machine_in_one_turn_does_not_count() -> None:
    """Ratios are taken turn by turn: a turn that is slow for both says nothing against either."""
    choice = choose({"serial": [1.5, 6.0, 1.5, 1.5], "2 lanes": [1.0, 4.0, 1.0, 1.0]})
    assert (choice.name, choice.times_faster) == ("2 lanes", 1.5)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ([0.9, 1.2, 0.9, 1.2, 0.8], "the gain of 2 lanes is within the noise"),
        ([0.99] * 5, "the gain of 2 lanes is within the noise"),
        (
            [1.3] * 5,
            "nothing is gained: the best other way, 2 lanes, takes 1.30 s against 1.00 s serially",
        ),
    ],
)
def test_serial_stays_unless_the_gain_is_beyond_the_noise(other: list[float], reason: str) -> None:
    """A gain that a quarter of the turns deny, or one of a percent, is not worth several lanes."""
    choice = choose({"serial": [1.0] * 5, "2 lanes": other})
    assert (choice.name, choice.times_faster) == ("serial", 1.0)
    assert choice.reason.startswith(reason)


def test_alone_there_is_nothing_to_choose() -> None:
    """The serial one by itself is the choice."""
    assert choose({"serial": [1.0]}).reason == "no other way was measured"
