"""Loops that take turns: their order, which rounds are kept, and quotients of samples that belong together."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.probe.turns import evenly, in_turns, ratio
from ridgeline.recording.turns import MOST_CALLS, call_s, calls_in


def test_loops_take_turns_in_both_orders() -> None:
    """None always follows the same other one; samples of a round stand at the same place."""
    order: list[str] = []

    def loop(name: str, scale: float) -> float:
        order.append(name)
        return scale * len(order)

    found = in_turns({"a": lambda: loop("a", 1.0), "b": lambda: loop("b", 10.0)}, 3, 0.0)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": (1.0, 4.0, 5.0), "b": (20.0, 30.0, 60.0)}
    assert ratio(found["b"], found["a"]).samples == (20.0, 7.5, 12.0)


def test_rounds_go_on_for_a_while_and_some_are_kept() -> None:
    """Ten until the six seconds are over, at one a look; five of them are kept, with what belongs to them."""
    a, b, clock = itertools.count(), itertools.count(100), itertools.count()
    found = in_turns(
        {"a": lambda: next(a), "b": lambda: next(b)}, 5, 6.0, lambda: float(next(clock))
    )
    assert found == {"a": (0, 2, 4, 6, 8), "b": (100, 102, 104, 106, 108)}


@given(st.lists(st.integers(), max_size=50, unique=True), st.integers(1, 60))
def test_what_is_kept_is_spread_evenly(found: list[int], most: int) -> None:
    """As many as there may be, in their order, the first among them, and gaps that differ by one at most."""
    kept = evenly(found, most)
    assert len(kept) == min(most, len(found))
    places = [found.index(one) for one in kept]
    assert places == sorted(places)
    assert places[:1] == [0] * bool(found)
    gaps = [after - before for before, after in itertools.pairwise([*places, len(found)])]
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_block_is_filled() -> None:
    """With at least one call, and no more than are timed well enough, also of what takes no time."""
    assert [calls_in(1.0, once_s) for once_s in (0.3, 5.0, 1e-6, 0.0)] == [
        3,
        1,
        MOST_CALLS,
        MOST_CALLS,
    ]


def test_a_block_begins_and_ends_with_a_wait() -> None:
    """So that nothing from before is timed, and all that the calls have issued is."""
    order: list[str] = []
    seconds = call_s(lambda: order.append("call"), 3, lambda: order.append("wait"))
    assert order == ["wait", "call", "call", "call", "wait"]
    assert seconds >= 0.0
