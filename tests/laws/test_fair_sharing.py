"""Max-min fair sharing: what makes rates fair, when flows end, and what is no law of networks."""

import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import laws
from ridgeline.errors import LawError
from ridgeline.laws import Flow, fair_finish_seconds, fair_rates

LINKS = "abcd"
WITHIN = 1.0 + 1e-9

rates = st.floats(1e-3, 1e12)
networks = st.fixed_dictionaries(dict.fromkeys(LINKS, rates))
flows = st.builds(
    Flow,
    links=st.lists(st.sampled_from(LINKS), min_size=1, max_size=4, unique=True).map(tuple),
    num_bytes=st.sampled_from((0.0, 1.0, 1e6)) | st.floats(0.0, 1e12),
    start_s=st.sampled_from((0.0, 0.0, 1.0)) | st.floats(0.0, 1e3),
    most_bytes_per_s=st.just(math.inf) | rates,
)
on_one_link = flows.map(lambda flow: flow._replace(links=("a",)))
many = st.lists(flows, max_size=12)
many_on_one = st.lists(on_one_link, min_size=1, max_size=12)


def load(link: str, sharing: Sequence[Flow], found: Sequence[float]) -> float:
    return math.fsum(rate for flow, rate in zip(sharing, found, strict=True) if link in flow.links)


@given(many, networks)
def test_no_link_carries_more_than_it_can(sharing: list[Flow], capacities: Mapping) -> None:
    """And no flow has more than it wants, or nothing."""
    found = fair_rates(sharing, capacities)
    for link, capacity in capacities.items():
        assert load(link, sharing, found) <= capacity * WITHIN
    for flow, rate in zip(sharing, found, strict=True):
        assert 0.0 < rate <= flow.most_bytes_per_s


@given(many, networks)
def test_every_flow_is_held_back_by_something(sharing: list[Flow], capacities: Mapping) -> None:
    """By its own limit, or by a full link on which nobody has more: that is what max-min fairness means."""
    found = fair_rates(sharing, capacities)
    for flow, rate in zip(sharing, found, strict=True):
        if rate == flow.most_bytes_per_s:
            continue
        assert any(
            load(link, sharing, found) >= capacities[link] / WITHIN
            and all(
                other <= rate * WITHIN
                for one, other in zip(sharing, found, strict=True)
                if link in one.links
            )
            for link in flow.links
        )


@given(st.integers(1, 200), st.floats(1.0, 1e12), rates)
def test_equal_flows_end_together(number: int, num_bytes: float, capacity: float) -> None:
    """Each after the time that the link needs for the bytes of all."""
    found = fair_finish_seconds([Flow(("a",), num_bytes)] * number, {"a": capacity})
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(number * num_bytes / capacity, rel=1e-12)


@given(many, networks, st.randoms(use_true_random=False))
def test_the_order_of_flows_means_nothing(sharing: list[Flow], capacities: Mapping, draw) -> None:
    """Bit for bit; so does asking twice, and the order of links."""
    order = draw.sample(range(len(sharing)), len(sharing))
    mixed = [sharing[index]._replace(links=sharing[index].links[::-1]) for index in order]
    turned = dict(reversed(capacities.items()))
    for ask in (fair_rates, fair_finish_seconds):
        found = ask(sharing, capacities)
        assert found == ask(sharing, capacities)
        assert ask(mixed, turned) == tuple(found[index] for index in order)


@given(many, networks)
def test_no_flow_ends_before_its_bytes_can_be_through(
    sharing: list[Flow], capacities: Mapping
) -> None:
    """Alone on its way; and a link needs its time for all that pass it."""
    found = fair_finish_seconds(sharing, capacities)
    for flow, end_s in zip(sharing, found, strict=True):
        alone = min(flow.most_bytes_per_s, *(capacities[link] for link in flow.links))
        assert end_s * WITHIN >= flow.start_s + flow.num_bytes / alone
    for link, capacity in capacities.items():
        passing = [index for index, flow in enumerate(sharing) if link in flow.links]
        needed_s = math.fsum(sharing[index].num_bytes for index in passing) / capacity
        assert max((found[index] for index in passing), default=0.0) * WITHIN >= needed_s


@given(many, networks, st.floats(1e-3, 1e3))
def test_a_network_that_is_faster_everywhere_is_as_much_faster(
    sharing: list[Flow], capacities: Mapping, factor: float
) -> None:
    """Of what starts at once, with limits that grow alike."""
    at_once = [flow._replace(start_s=0.0) for flow in sharing]
    faster = [flow._replace(most_bytes_per_s=factor * flow.most_bytes_per_s) for flow in at_once]
    found = fair_finish_seconds(at_once, capacities)
    then = fair_finish_seconds(faster, {link: factor * c for link, c in capacities.items()})
    assert then == pytest.approx([end_s / factor for end_s in found], rel=1e-6)


@given(many_on_one, rates, st.floats(1.0, 1e3))
def test_on_one_link_nobody_loses_by_more_room(
    sharing: list[Flow], capacity: float, factor: float
) -> None:
    """Neither by a faster link nor by one flow less; of networks neither is true."""
    found = fair_finish_seconds(sharing, {"a": capacity})
    for now_s, then_s in zip(
        found, fair_finish_seconds(sharing, {"a": factor * capacity}), strict=True
    ):
        assert then_s <= now_s * WITHIN
    for now_s, then_s in zip(
        found[1:], fair_finish_seconds(sharing[1:], {"a": capacity}), strict=True
    ):
        assert then_s <= now_s * WITHIN


@given(many_on_one, rates)
def test_one_link_never_rests(sharing: list[Flow], capacity: float) -> None:
    """Sharing changes who waits, not how long all take together: the last ends as in a queue."""
    hungry = [flow._replace(most_bytes_per_s=math.inf) for flow in sharing]
    queued_s = 0.0
    for flow in sorted(hungry, key=lambda flow: flow.start_s):
        queued_s = max(queued_s, flow.start_s) + flow.num_bytes / capacity
    assert max(fair_finish_seconds(hungry, {"a": capacity})) == pytest.approx(queued_s, rel=1e-9)


def test_more_room_elsewhere_may_take_room_here() -> None:
    """Why no law says that faster links never slow a flow: here the first one gets through to the second link."""
    sharing = [Flow(("a", "b")), Flow(("b",))]
    assert fair_rates(sharing, {"a": 1.0, "b": 10.0}) == (1.0, 9.0)
    assert fair_rates(sharing, {"a": 4.0, "b": 10.0}) == (4.0, 6.0)


def test_rates_are_shared_anew_when_flows_come_and_go() -> None:
    """Alone for 2 s at 10 B/s, in three for 3 s at 2 (one wants no more) and 4; traffic without end stays."""
    sharing = [
        Flow(("a",), 32.0),
        Flow(("a",), 6.0, start_s=2.0, most_bytes_per_s=2.0),
        Flow(("a", "b"), math.inf, start_s=2.0),
    ]
    assert fair_finish_seconds(sharing, {"a": 10.0, "b": 1e9}) == (5.0, 5.0, math.inf)
    assert fair_finish_seconds([], {}) == fair_rates([], {}) == ()


@pytest.mark.parametrize(
    ("flow", "capacity", "message"),
    [
        (
            Flow(("a", "x"), 1.0),
            1.0,
            "wanted links out of a, got 'x'; give its capacity",
        ),
        (
            Flow(("a", "a"), 1.0),
            1.0,
            "wanted each link once on the way of a flow, got a, a; name it once",
        ),
        (
            Flow((), 1.0),
            1.0,
            "wanted a flow over at least one link, or with a finite most_bytes_per_s, got neither; name its links",
        ),
        (
            Flow(("a",), 1.0),
            0.0,
            "wanted a finite capacity of a > 0, got 0; give a number in that range",
        ),
        (
            Flow(("a",), -1.0),
            1.0,
            "wanted a num_bytes >= 0, got -1; give a number in that range",
        ),
        (
            Flow(("a",), 1.0, start_s=math.inf),
            1.0,
            "wanted a finite start_s >= 0, got inf; give a number in that range",
        ),
        (
            Flow(("a",), 1.0, most_bytes_per_s=0.0),
            1.0,
            "wanted a most_bytes_per_s > 0, got 0; give a number in that range",
        ),
    ],
)
def test_messages(flow: Flow, capacity: float, message: str) -> None:
    for ask in (laws.fair_rates, laws.fair_finish_seconds):
        with pytest.raises(LawError) as caught:
            ask([flow], {"a": capacity})
        assert str(caught.value) == message
