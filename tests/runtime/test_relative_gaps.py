"""Gaps of many tensors at once are those of each alone."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.steps.checks.relative_gaps import (
    RESOLUTION,
    Compared,
    alignment,
    counts,
    relative_gaps,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64]


def alone(one: Compared) -> float:
    """The definition."""
    gap, change = (one.wanted - one.got).abs().double(), (one.wanted - one.before).abs().double()
    if one.mask is not None and one.num_masked:
        gap, change = gap[~one.mask], change[~one.mask]
        gap[gap.argsort(descending=True)[: one.num_masked]] = 0.0
    size = max(float(change.norm()), RESOLUTION * float(one.wanted.abs().double().norm()))
    distance = float(gap.norm())
    return distance / size if size else distance


@st.composite
def tensors(draw: st.DrawFn) -> Compared:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    scale = draw(st.sampled_from([0.0, 1e-3, 1.0, 50.0]))
    made = [(torch.randn(shape, generator=generator) * scale * 10).to(dtype) for _ in range(3)]
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    if draw(st.booleans()):
        return Compared(*made, mask, *counts([mask]))
    return Compared(*made)


@given(st.lists(tensors(), max_size=6))
def test_many_at_once_are_as_each_alone(compared: list[Compared]) -> None:
    """Of all types, with and without elements to leave out."""
    assert relative_gaps(compared) == pytest.approx([alone(one) for one in compared], rel=1e-9)


def test_other_shapes_are_infinitely_far_apart_and_nan_stays() -> None:
    """Unless both ways came to the same tensor."""
    one, two = torch.ones(2), torch.ones(3)
    assert relative_gaps([Compared(one, one, two), Compared(one, two, two)]) == [math.inf, 0.0]
    nan: Tensor = torch.tensor([math.nan, 1.0])
    assert math.isnan(relative_gaps([Compared(one, nan, one)])[0])
    assert relative_gaps([Compared(one, nan, one, nan.isnan(), 1)]) == [0.0]


@given(
    st.integers(20, 200),
    st.sampled_from([torch.float32, torch.float64, torch.complex64]),
    st.floats(0.001, 100.0),
    st.booleans(),
)
def test_a_wrong_factor_lies_along_the_change(
    size: int, dtype: torch.dtype, factor: float, is_masked: bool
) -> None:
    """Whatever is left out; what moves half of a change up and half down lies across it."""
    generator = torch.Generator().manual_seed(size)
    before = torch.randn(size, generator=generator, dtype=dtype)
    change = torch.randn(size, generator=generator, dtype=dtype).repeat(2)
    sides = torch.ones(2 * size, dtype=dtype)
    sides[:size] = -1.0
    before = before.repeat(2)
    mask = torch.zeros(2 * size, dtype=torch.bool)
    mask[0] = is_masked
    wrong = Compared(
        before, before + change, before + (1.0 + factor) * change, mask, int(is_masked)
    )
    assert alignment(wrong) == pytest.approx(1.0, abs=0.2 if is_masked else 1e-3)
    across = wrong._replace(got=wrong.wanted + factor * sides * change, mask=None, num_masked=0)
    assert alignment(across) < 0.1


def test_what_has_no_size_is_taken_to_lie_along_it() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert alignment(Compared(one, one, two)) == 1.0
    assert alignment(Compared(one, two, torch.ones(3))) == 1.0
    assert alignment(Compared(one, two, torch.full((2,), math.inf))) == 1.0
