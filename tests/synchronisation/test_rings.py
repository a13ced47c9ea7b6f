"""Rings over link graphs: no bandwidth is used twice, and on known machines none is left unused."""

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.errors import PlanError
from ridgeline.machine import Link, Quantity, SizePoint
from ridgeline.synchronisation.rings import (
    PortLimit,
    RingOrder,
    find_rings,
    link_rates,
    ports,
    read,
    split,
    written,
)
from strategies import make_machine

Links = list[list[float]]
DGX_1 = {
    1: ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)),
    2: ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)),
}
"""Pairs of eight V100 by number of NVLinks. Source: NVIDIA DGX-1 with Tesla V100, white paper, 2017."""


def all_pairs(size: int, rate: float) -> Links:
    return [[rate * (a != b) for b in range(size)] for a in range(size)]


def cube() -> Links:
    links = all_pairs(8, 0.0)
    for rate, pairs in DGX_1.items():
        for a, b in pairs:
            links[a][b] = links[b][a] = float(rate)
    return links


def torus(side: int) -> Links:
    links = all_pairs(side * side, 0.0)
    for x in range(side):
        for y in range(side):
            for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1)):
                links[x * side + y][(x + dx) % side * side + (y + dy) % side] = 1.0
    return links


def check_fit(rings: Sequence[RingOrder], links: Links, limits: Sequence[PortLimit]) -> None:
    """Every ring goes around all workers, and together they stay within links and limits."""
    loads = {(a, b): 0.0 for a in range(len(links)) for b in range(len(links))}
    for ring in rings:
        assert sorted(ring.order) == [*range(len(links))]
        assert ring.bytes_per_s > 0.0
        for a, b in zip(ring.order, (*ring.order[1:], ring.order[0]), strict=True):
            loads[a, b] += ring.bytes_per_s
    slack = 1.0 + 1e-9
    assert all(load <= links[a][b] * slack for (a, b), load in loads.items())
    for group, rate in limits:
        leaving = sum(load for (a, b), load in loads.items() if a in group and b not in group)
        entering = sum(load for (a, b), load in loads.items() if b in group and a not in group)
        assert max(leaving, entering) <= rate * slack


def test_the_cube_of_eight_gpus_has_two_rings() -> None:
    """One over the double links and one over the single ones, each in both directions: all six links work."""
    rings = find_rings(cube())
    check_fit(rings, cube(), ())
    assert [ring.bytes_per_s for ring in rings] == [2.0, 2.0, 1.0, 1.0]
    double, back, single, _ = (ring.order for ring in rings)
    assert double == (0, 3, 2, 1, 5, 6, 7, 4)
    assert back == (0, *reversed(double[1:]))
    assert single == (0, 1, 3, 7, 5, 4, 6, 2)


UPLINKS = tuple(PortLimit(frozenset(pair), 12.0) for pair in ((0, 2), (1, 3)))
HOSTS = tuple(PortLimit(frozenset(range(4 * h, 4 * h + 4)), 1.25) for h in range(4))
BY_HOST = [[(100.0 if a // 4 == b // 4 else 1.25) * (a != b) for b in range(16)] for a in range(16)]


@pytest.mark.parametrize(
    ("links", "limits", "total", "count"),
    [
        (all_pairs(8, 450.0), ports(8, 450.0), 450.0, 1),
        (all_pairs(4, 12.0), (*ports(4, 12.0), *UPLINKS), 12.0, 1),
        (BY_HOST, HOSTS, 1.25, 1),
        (torus(3), (), 4.0, 4),
        (torus(4), (), 4.0, 4),
        (all_pairs(2, 3.0), (), 3.0, 1),
        (all_pairs(5, 1.0), (), 4.0, 4),
        (all_pairs(8, 1.0), (), 7.0, 7),
    ],
    ids=["NVSwitch", "PCIe", "Ethernet", "torus 3", "torus 4", "pair", "five", "eight"],
)
def test_known_machines_are_used_fully(
    links: Links, limits: tuple[PortLimit, ...], total: float, count: int
) -> None:
    """As much as any worker's links or any limit let through: nothing could carry more."""
    rings = find_rings(links, limits)
    check_fit(rings, links, limits)
    assert sum(ring.bytes_per_s for ring in rings) == pytest.approx(total)
    assert len(rings) == count


def test_a_tree_of_bridges_is_crossed_once() -> None:
    """Workers below one bridge follow each other, though any two are as near."""
    (ring,) = find_rings(all_pairs(4, 12.0), (*ports(4, 12.0), *UPLINKS))
    assert ring.order in ((0, 1, 3, 2), (0, 2, 1, 3), (0, 2, 3, 1), (0, 3, 1, 2))


@given(st.integers(2, 6), st.data())
def test_whatever_the_links(size: int, data: st.DataObject) -> None:
    """Nothing is used twice, whatever is measured; and a single way around is found if there is one."""
    rates = st.sampled_from((0.0, 0.3, 1.0, 1.7, 25.0))
    links = [[data.draw(rates) if a != b else 0.0 for b in range(size)] for a in range(size)]
    groups = st.frozensets(st.integers(0, size - 1), min_size=1, max_size=size - 1)
    limits = tuple(
        PortLimit(group, rate)
        for group, rate in data.draw(st.lists(st.tuples(groups, st.floats(0.1, 9.0)), max_size=3))
    )
    check_fit(find_rings(links, limits), links, limits)
    order = data.draw(st.permutations(range(size)))
    for a, b in zip(order, (*order[1:], order[0]), strict=True):
        links[a][b] = max(links[a][b], 0.3)
    assert find_rings(links, limits)


def test_no_way_around_is_no_ring() -> None:
    """A worker at the end of a chain cannot be passed through."""
    assert find_rings([[0, 1, 0], [1, 0, 1], [0, 1, 0]]) == ()


@given(st.integers(0, 10_000), st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9))
def test_parts_cover_the_payload(num_elements: int, weights: list[float]) -> None:
    """Each element is in one part, and parts are in proportion, as far as alignment allows."""
    parts = split(num_elements, weights, 16)
    ends = [0, *(end for _, end in parts)]
    assert [begin for begin, _ in parts] == ends[:-1]
    assert ends[-1] == num_elements
    for (begin, end), weight in zip(parts, weights, strict=True):
        assert end - begin >= 0
        assert abs(end - begin - num_elements * weight / sum(weights)) <= 32


def test_rings_survive_their_words() -> None:
    """What is found can be said in a plan; saying nothing is once around and once back."""
    rings = find_rings(cube())
    assert written(rings).startswith("0,3,2,1,5,6,7,4:2;0,4,7,6,5,1,2,3:2;0,1,3,7")
    assert read(written(rings), 8) == rings
    assert [ring.order for ring in read("", 4)] == [(0, 1, 2, 3), (0, 3, 2, 1)]
    assert [ring.order for ring in read("", 2)] == [(0, 1)]
    assert read("1,0,2", 3) == (RingOrder((1, 0, 2), 1.0),)


@pytest.mark.parametrize("part", ["0,1", "0,1,1", "0,1,2:0", "0,1,2:x", "0,1,2:inf", "x"])
def test_words_that_are_no_rings(part: str) -> None:
    """Refused with the part that is meant."""
    message = (
        f"wanted sync.options['orders'] as orders of all 3 workers and their parts, got {part!r} in the plan; "
        "for example '0,1,2:1;0,2,1:1'"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        read(f"0,1,2:1;{part}", 3)


def test_links_that_are_no_square() -> None:
    """Refused with what was given."""
    message = (
        "wanted links as bytes per second >= 0 from each of several workers to each, got [[0, 1]]; give one "
        "row and one column a worker"
    )
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        find_rings([[0, 1]])


def test_links_of_a_measured_machine() -> None:
    """By the largest copy from GPU to GPU; what was not measured is no link."""
    table = tuple(
        SizePoint(num_bytes=size, seconds=Quantity.assumed(seconds, "s"))
        for size, seconds in ((1000, 1e-3), (1 << 20, 1e-4))
    )
    link = Link(direction="device_to_device", source=1, target=0, table=table)
    links = (link, Link(direction="device_to_device", source=0, target=1, table=()))
    measured = msgspec.structs.replace(make_machine(device="cuda"), links=links)
    rates = link_rates(measured, 2)
    assert rates[0] == [0.0, 0.0]
    assert rates[1] == [pytest.approx((1 << 20) / 1e-4), 0.0]
