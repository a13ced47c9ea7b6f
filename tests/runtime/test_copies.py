"""Copying a batch of few or many tensors to fixed places."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.tensors.copies import MOST_COPIES, common_type, copier, copier_as, copy_into


@given(st.integers(0, 2 * MOST_COPIES))
def test_targets_hold_what_sources_held(count: int) -> None:
    """Whatever their number, types and strides; the targets stay where they are."""
    kinds = (torch.float32, torch.int64, torch.bfloat16)
    sources = [torch.randn(3, 4).mul(9).to(kinds[i % 3]).t() for i in range(count)]
    targets = [torch.zeros(4, 3, dtype=source.dtype) for source in sources]
    places = [target.data_ptr() for target in targets]
    copy_into(targets, sources)
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
    assert [target.data_ptr() for target in targets] == places


numbers = st.sampled_from(
    [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64]
)
shapes = st.sampled_from([(3,), (2, 5), (1, 1), (0, 4), (2, 3, 4)])


@given(st.lists(st.tuples(numbers, shapes), min_size=2, max_size=5), st.randoms())
def test_tensors_of_several_types_are_copied_bit_by_bit(
    kinds: list[tuple[torch.dtype, tuple[int, ...]]], random: Any
) -> None:
    """As elements of one type, whatever the bits: all patterns of NaN are among them."""
    sources, targets = [], []
    for dtype, shape in kinds:
        size = dtype.itemsize * torch.Size(shape).numel()
        bits = torch.tensor([*random.randbytes(size)], dtype=torch.uint8)
        sources.append(bits.view(dtype).view(shape))
        targets.append(torch.zeros(shape, dtype=dtype))
    kind = common_type(sources)
    assert (kind is None) == (len({dtype for dtype, _ in kinds}) == 1)
    if kind is not None:
        copier_as(kind, targets)(sources)
        for source, target in zip(sources, targets, strict=True):
            assert torch.equal(source.view(torch.uint8), target.view(torch.uint8))


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros((), dtype=torch.int64),
        torch.zeros(4, 2, dtype=torch.int64).t(),
        torch.zeros(1, dtype=torch.int64).expand(4),
        torch.zeros(4, dtype=torch.float64, requires_grad=True),
        torch.zeros(4, dtype=torch.bool),
        torch.zeros(4, dtype=torch.bfloat16),
    ],
)
def test_what_cannot_be_viewed_or_moved_as_bits_has_no_common_type(other: torch.Tensor) -> None:
    """And is copied as what it is."""
    first = torch.arange(4.0)
    assert common_type([first, other]) is None
    targets = [torch.empty_like(first), torch.ones_like(other, requires_grad=False)]
    copier(targets, [first, other])([first, other.detach()])
    assert torch.equal(targets[0], first)
    assert torch.equal(targets[1], other)


def test_one_tensor_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        copy_into([torch.zeros(1), torch.zeros(1)], [torch.zeros(1)])
