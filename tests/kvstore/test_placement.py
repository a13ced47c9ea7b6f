"""Keys and their parts: all are placed, large ones on all places, and none has much more than another."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.runtime.kvstore.serving.segment import SharedPlaces
from ridgeline.runtime.kvstore.values.placement import LARGE_ELEMENTS, placed

SHAPES = st.dictionaries(
    st.integers(0, 50), st.lists(st.integers(0, 2000), max_size=3), min_size=1, max_size=20
)


@given(shapes=SHAPES, places=st.integers(1, 8), divided=st.booleans())
def test_parts_are_the_whole(shapes: dict[int, list[int]], places: int, divided: bool) -> None:
    """In the order of rows, none at a place twice; small keys and what must stay whole are one part."""
    found = placed(shapes, [0] * places, divides=divided)
    for key, shape in shapes.items():
        parts, rows = found[key], shape[0] if shape else 1
        assert parts[0].start == 0
        assert parts[-1].stop == rows
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert len({part.place for part in parts}) == len(parts)
        is_large = math.prod(shape) >= LARGE_ELEMENTS and divided
        assert len(parts) == (min(rows, places) if is_large else 1)


@given(
    sizes=st.lists(st.integers(1, LARGE_ELEMENTS - 1), min_size=1, max_size=40),
    places=st.integers(1, 8),
)
def test_loads_are_even(sizes: list[int], places: int) -> None:
    """No place has more than 4/3 of what the best placement gives the fullest (Graham, 1969)."""
    shapes = {number: [size] for number, size in enumerate(sizes)}
    found = placed(shapes, [0] * places, divides=True)
    loads = [0] * places
    for key, (part,) in found.items():
        loads[part.place] += sizes[key]
    ordered = sorted(sizes, reverse=True)
    two = ordered[places - 1] + ordered[places] if len(ordered) > places else 0
    least = max(sum(sizes) / places, ordered[0], two)  # the best there is needs no less
    assert max(loads) <= (4 / 3) * least + ordered[0] * (len(sizes) > places)


@pytest.mark.parametrize("loads", [[5, 0, 9], [5, 6, 9]])
def test_what_is_held_already_counts(loads: list[int]) -> None:
    """A key goes where there is least."""
    (part,) = placed({"w": [3]}, loads, divides=True)["w"]
    assert part.place == loads.index(min(loads))


@given(
    asked=st.lists(st.integers(1, 40_000), max_size=30),
    gives=st.lists(st.integers(0, 9), max_size=30),
)
def test_places_in_shared_memory_never_overlap(asked: list[int], gives: list[int]) -> None:
    """They lie within it, and what was given back is found again: all of it once nothing is taken."""
    size = 1 << 17
    room = SharedPlaces(size)
    taken: dict[int, int] = {}
    for number, num_bytes in enumerate(asked):
        place = room.take(num_bytes)
        if place is not None:
            assert place % 64 == 0
            assert 0 <= place <= size - num_bytes
            assert all(place + num_bytes <= p or p + n <= place for p, n in taken.items())
            taken[place] = num_bytes
        if taken and number < len(gives):
            freed = sorted(taken)[gives[number] % len(taken)]
            room.give(freed)
            del taken[freed]
    for place in taken:
        room.give(place)
    assert room.take(size) == 0
    assert room.take(1) is None
