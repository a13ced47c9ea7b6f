"""Copies of a GPU's state for checkpoints: pinned, the same bits, and in the same memory every time."""

import pytest
import torch

from ridgeline.runtime.checkpoints.staging import Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_copies_of_a_gpus_state() -> None:
    """They hold what was there when they were made, however much was enqueued before and is behind."""
    weight = torch.zeros(1 << 22, device="cuda")
    state = {
        "weight": weight,
        "turned": weight.view(1 << 11, 1 << 11).t(),
        "step": torch.tensor(3.0),
    }
    staging = Staging()
    places = set()
    for turn in range(1, 4):
        for _ in range(turn * 100):
            weight.add_(1.0)
        copies = staging.copies(state)
        wanted = float(weight[0])
        weight.add_(1.0)
        assert copies["weight"].is_pinned()
        assert bool((copies["weight"] == wanted).all())
        assert bool((copies["turned"] == wanted).all())
        assert float(copies["step"]) == 3.0
        places.add(copies["weight"].data_ptr())
    assert len(places) == 1
    staging.close()
