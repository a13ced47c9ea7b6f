"""What the check changes about a batch: other values, but of the same kind, so that no index leaves its table."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.steps.checks.perturbation import perturb_inputs
from ridgeline.runtime.steps.checks.perturbed_runs import LEARNING_RATE_FACTORS


def perturbed(originals: list[Tensor], shift: int) -> list[Tensor]:
    inputs = [tensor.clone() for tensor in originals]
    perturb_inputs(inputs, originals, shift)
    return inputs


shifts = st.integers(0, len(LEARNING_RATE_FACTORS) - 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), shifts)
def test_order_and_beginning_stay(values: list[int], shift: int) -> None:
    """Offsets of bags begin with 0 and rise; lengths that fall go on falling."""
    for ordered in (sorted(values), sorted(values, reverse=True)):
        [found] = perturbed([torch.tensor(ordered)], shift)
        assert found[0] == ordered[0]
        assert found.tolist() == sorted(found.tolist(), reverse=ordered[0] > ordered[-1])
        assert set(found.tolist()) <= set(ordered)


@given(st.integers(1, 6), st.integers(1, 4), shifts)
def test_values_stay_in_their_column_and_beside_their_row(
    rows: int, columns: int, shift: int
) -> None:
    """Each column has classes of its own; labels go with their samples."""
    fields = torch.arange(rows)[:, None] + 100 * torch.arange(columns)
    labels = torch.arange(rows)
    found, beside = perturbed([fields, labels], shift)
    if rows > 1:
        assert torch.equal(found, beside[:, None] + 100 * torch.arange(columns))
    assert all(
        {*found[:, c].tolist()} <= {*fields[:, c].tolist()} for c in range(columns) if rows > 1
    )


@given(shifts)
def test_probabilities_stay_probabilities(shift: int) -> None:
    """Numbers are made smaller, never larger, and the first check sees the batch as it is."""
    original = torch.rand(6, 3)
    [found] = perturbed([original], shift)
    assert found.min() >= 0
    assert found.max() <= 1
    assert torch.equal(found, original) == (shift == 0)
