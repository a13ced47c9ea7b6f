"""Programs for the shapes that prevail, and for a last batch; none for shapes that come and go."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.tensors.batch import signature
from ridgeline.tensors.usual_shapes import MOST_OTHERS, MOST_SHAPES, REPEATS, UsualShapes


def batch(size: int) -> torch.Tensor:
    return torch.empty(size, 2)


def test_the_first_shape_is_the_usual_one_until_another_prevails() -> None:
    """An odd first batch is not waited for for ever."""
    shapes = UsualShapes()
    assert shapes.is_usual(batch(3))
    assert [shapes.is_usual(batch(8)) for _ in range(REPEATS)] == [False] * (REPEATS - 1) + [True]
    assert not shapes.is_usual(batch(3))
    assert shapes.is_usual(batch(8))


def test_a_last_batch_that_comes_again_is_worth_a_program() -> None:
    """The second time it comes; and there is room for one only."""
    shapes = UsualShapes()
    short, other = signature(batch(3)), signature(batch(4))
    assert [shapes.is_worth_another(short, 1) for _ in range(2)] == [False, True]
    assert [shapes.is_worth_another(other, MOST_SHAPES) for _ in range(3)] == [False] * 3


@given(st.lists(st.integers(1, 30), min_size=20, max_size=40))
def test_shapes_that_come_and_go_get_no_program(sizes: list[int]) -> None:
    """Once there are more shapes than a few, one that comes twice means nothing."""
    shapes = UsualShapes()
    met: set[int] = set()
    for size in sizes:
        is_worth = shapes.is_worth_another(signature(batch(size)), 1)
        assert is_worth == (size in met and len(met) <= MOST_OTHERS)
        met.add(size)
