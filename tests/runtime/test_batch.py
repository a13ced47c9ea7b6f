"""Batches: any nest of tensors, split exactly, and checked against what a step was made for."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import BatchError
from ridgeline.runtime import batch as batches


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


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            (torch.zeros(8, 3), torch.zeros(8, dtype=torch.int32)),
            r"wanted leaf 1 of the batch as \(8,\) int64, got \(8,\) int32; only the leading dimension",
        ),
        (
            (torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)),
            r"wanted leaf 0 of the batch as \(8, 3\) float32, got \(8, 4\) float32",
        ),
        (
            (torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64)),
            "only the leading dimension may shrink",
        ),
        ([torch.zeros(8, 3)], "wanted batches of structure"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(other: Any, message: str) -> None:
    """Another structure, dtype, inner shape or more samples is an error that names the leaf."""
    wanted = batches.signature((torch.zeros(8, 3), torch.zeros(8, dtype=torch.int64)))
    with pytest.raises(BatchError, match=message):
        batches.check_compatible(wanted, batches.signature(other))


def test_a_shorter_last_batch_is_compatible_but_not_equal() -> None:
    """Fewer samples are told apart from the same shape and from an error."""
    full, short = ((torch.zeros(n, 3), {"y": torch.zeros(n)}) for n in (8, 5))
    wanted = batches.signature(full)
    assert batches.check_compatible(wanted, batches.signature(full))
    assert not batches.check_compatible(wanted, batches.signature(short))
