"""Copying a batch of few or many tensors to fixed places."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.tensors.copies import MOST_COPIES, copy_into


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


def test_one_tensor_too_few_is_an_error() -> None:
    with pytest.raises(ValueError, match="shorter"):
        copy_into([torch.zeros(1), torch.zeros(1)], [torch.zeros(1)])
