"""Sparse rows pushed by several workers: who serves them tells the others of all rows that an update changes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, SetOptimizer
from ridgeline.runtime.kvstore.values import rows
from ridgeline.runtime.kvstore.values.placement import ValuePart
from ridgeline.tensors.row_sums import rows_tensor


@pytest.mark.parametrize(("common", "own"), [(0.9, None), (0.0, 0.9)])
def test_rows_that_move_by_their_momenta_are_told(
    monkeypatch: pytest.MonkeyPatch, common: float, own: float | None
) -> None:
    """Also where only the key's own settings say that there are momenta."""
    sent: list[Sequence[Tensor]] = []

    def exchange(sends: Sequence[Tensor], sizes: Sequence[int], _: Any) -> list[Tensor]:
        """As one of two workers, of whom the other has nothing."""
        sent.append(sends)
        return [sends[0], sends[1].new_zeros(sizes[1])]

    monkeypatch.setattr(rows, "all_to_all_uneven", exchange)
    monkeypatch.setattr(rows.dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(rows.dist, "get_rank", lambda _: 0)
    by_key = {} if own is None else {"w": {"lr": 0.1, "momentum": own}}
    updater = OptimizerUpdater(SetOptimizer("sgd", 1.0, {"lr": 0.1, "momentum": common}, by_key))
    value = torch.ones(3, 2)
    for number in range(2):
        before = value.clone()
        total = rows_tensor(torch.tensor([number]), torch.ones(1, 2), value.shape)
        rows.push_rows("w", total, value, [ValuePart(0, 0, 3)], updater, None)  # type: ignore[arg-type]
        changed = (value != before).any(1).nonzero()[:, 0].tolist()
        told = sent[-2][1].tolist()  # numbers, before the rows themselves
        assert {*changed} <= {*told}
    assert changed == [0, 1]
