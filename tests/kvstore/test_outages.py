"""What connections have seen of an outage, put together: each moment counts once, each push that was sent again too."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.worker.outages import Silence, Silences, num_pushes

TIMES = st.integers(0, 40)


@st.composite
def seen(draw: st.DrawFn) -> list[Silence]:
    """As connections tell of them: each when it has ended."""
    pairs = draw(st.lists(st.tuples(TIMES, TIMES), max_size=8))
    ends = sorted((max(pair), min(pair)) for pair in pairs)
    return [
        Silence(began, ended, f"at {ended}", draw(st.integers(0, 3)), draw(st.booleans()))
        for ended, began in ends
    ]


@given(seen())
def test_silences_that_overlap_are_one(told: list[Silence]) -> None:
    """What is kept covers the same moments, in order, without overlap, and no push is lost or counted twice."""
    silences = Silences()
    for one in told:
        silences.add(one)
    kept = silences.all()
    assert all(one.ended_s < other.began_s for one, other in itertools.pairwise(kept))
    for moment in (half / 2 for half in range(81)):
        was_silent = any(one.began_s <= moment <= one.ended_s for one in told)
        assert was_silent == any(one.began_s <= moment <= one.ended_s for one in kept)
    for one in kept:
        parts = [part for part in told if one.began_s <= part.began_s <= one.ended_s]
        assert one.pushes == sum(part.pushes for part in parts)
        assert one.is_replaced == any(part.is_replaced for part in parts)
        assert one.address == parts[-1].address


def test_a_replacement_is_one_outage() -> None:
    """Also where one connection moves to the new server before another one looks; a second one counts apart."""
    silences = Silences()
    first = Silence(1.0, 2.0, "tcp://second", 6, is_replaced=True)
    later = Silence(2.5, 3.0, "tcp://second", 1, is_replaced=True)
    again = Silence(5.0, 6.0, "tcp://third", 2, is_replaced=True)
    for one in (first, later, again):
        silences.add(one)
    assert silences.all() == [Silence(1.0, 3.0, "tcp://second", 7, is_replaced=True), again]


def test_outages_say_who_missed_what() -> None:
    """With the moment by the clock on the wall."""
    silences = Silences()
    silences.add(Silence(1.0, 7.5, "tcp://there", 2, is_replaced=True))
    (outage,) = silences.outages(3, 1, wall_s=1000.0, now_s=11.0)
    assert str(outage) == (
        "worker 3 got no answer from server 1 from 1970-01-01 00:16:30 UTC on for 6.5 s; another took its "
        "place at tcp://there, 2 pushes sent again"
    )


def test_pushes_are_dense_or_of_rows() -> None:
    """Other calls are sent again too, and are none."""
    slot, shape = wire.ValueSlot("w", 0), wire.Shape("float32", (1,))
    bodies = [wire.Push(slot, shape), wire.PushRows(slot, shape), wire.Pull(slot), wire.Beat()]
    assert num_pushes(bodies) == 2
