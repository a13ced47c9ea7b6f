"""What is told of workers that hold other models."""

import pytest
import torch
from torch import nn

from ridgeline.errors import WorkloadError
from ridgeline.runtime.layout.initial_state import check_same_model, describe, difference
from ridgeline.workers.world import World


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    return model


def swapped() -> nn.Module:
    model = nn.Linear(2, 3)
    weight = model.weight
    del model.weight
    model.register_parameter("weight", weight)
    return model


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            frozen(),
            (
                "0.bias as float32 (3,) frozen on rank 1, float32 (3,) on rank 0 (1 of 7 parameters and buffers "
                "differ on ranks 1, 2)"
            ),
        ),
        (
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, track_running_stats=False)),
            (
                "1.running_mean as nothing on rank 1, buffer of float32 (3,) on rank 0 (3 of 7 parameters and "
                "buffers differ on ranks 1, 2)"
            ),
        ),
    ],
)
def test_the_first_difference_is_named(other: nn.Module, words: str) -> None:
    """With its name, what it is on both, and how many there are."""
    mine = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    by_rank = {0: describe(mine), 1: describe(other), 2: describe(other)}
    assert difference(by_rank, 0, [1, 2]) == words


def test_another_order_is_told() -> None:
    """The same names and types, which workers would put into other buckets."""
    by_rank = {0: describe(nn.Linear(2, 3)), 1: describe(swapped())}
    assert difference(by_rank, 0, [1]) == (
        "its parameters and buffers in another order on rank 1 than on rank 0"
    )


def test_a_lazy_layer_has_no_shape_to_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, on all workers, behind the comparison of what they have; torch's own error named no layer."""
    home = "ridgeline.runtime.layout.initial_state"
    monkeypatch.setattr(f"{home}.gather_bytes", lambda digest, *_: [digest, digest])
    monkeypatch.setattr(f"{home}.replicated_axes", lambda _: ("data",))
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyBatchNorm1d())
    with pytest.raises(
        WorkloadError, match=r"^wanted parameters and buffers .* got 1\.weight of a lazy module"
    ):
        check_same_model(model, World(0, 2, 0, torch.device("cpu")))
