"""Batches: any nest of tensors, split exactly."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import BatchError
from ridgeline.tensors import batch as batches


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40))
def test_shares_make_the_weighted_mean_the_whole_mean(samples: int, parts: int) -> None:
    """Splitting loses no sample, and shares times means of the parts sum to the mean of the whole."""
    values = torch.randn(samples, dtype=torch.float64)
    if parts > samples:
        with pytest.raises(BatchError, match=f"wanted at least accumulate={parts} samples"):
            batches.split({"x": values}, parts)
        return
    pieces = batches.split({"x": values, "constant": 3}, parts)
    assert torch.equal(torch.cat([piece["x"] for piece, _ in pieces]), values)
    assert all(piece["constant"] == 3 for piece, _ in pieces)
    mean = sum(share * piece["x"].mean() for piece, share in pieces)
    torch.testing.assert_close(mean, values.mean())


def test_samples_must_share_dimension_0() -> None:
    """Tensors with other leading sizes are refused by name of the sizes."""
    with pytest.raises(BatchError, match=r"share their leading dimension, got sizes \[4, 3\]"):
        batches.num_samples((torch.zeros(4), torch.zeros(3, 2)))
