"""Programs for the shapes that prevail, and for a last batch; none for shapes that come and go."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.tensors.batch import signature
from ridgeline.tensors.usual_shapes import (
    MOST_COUNTED,
    MOST_OTHERS,
    MOST_SHAPES,
    OTHER_CONSTANTS,
    REPEATS,
    UsualShapes,
)


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


def test_a_note_says_whether_shapes_or_constants_are_other() -> None:
    """As of a momentum in the batch, which changes in every step."""
    shapes = UsualShapes()
    rows = torch.ones(2, 3)
    assert shapes.why_other([rows, 0.5], "shapes") == "shapes"
    assert shapes.is_usual([rows, 0.5])
    assert shapes.why_other([rows, 0.6], "shapes") == OTHER_CONSTANTS
    assert shapes.why_other([rows, "sum"], "shapes") == OTHER_CONSTANTS
    others = ([rows, 0.5], [rows[:1], 0.6], [rows], [rows, rows], [rows, 0.6, 1])
    assert [shapes.why_other(other, "shapes") for other in others] == ["shapes"] * len(others)


def test_numbers_that_never_come_again_are_not_kept() -> None:
    """What is counted has an end; a shape that is met often becomes the usual one all the same."""
    shapes = UsualShapes()
    for number in range(3 * MOST_COUNTED):
        shapes.is_usual(number)
        shapes.is_worth_another(signature(-number), 1)
    assert len(vars(shapes)["_others"]) == MOST_COUNTED
    assert [shapes.is_usual("often") for _ in range(REPEATS)] == [False] * (REPEATS - 1) + [True]
