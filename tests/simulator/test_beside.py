"""Weight gradients beside the chain: which operators are taken for such, and what is left of them."""

import msgspec
import pytest
import torch
from torch import nn

import ridgeline as rl
from ridgeline.machine import Setting
from ridgeline.simulator.compiler import beside
from ridgeline.simulator.compiler.beside import HIDDEN_SHARE, hide_weight_gradients
from ridgeline.simulator.pricing.pieces import Piece, price_step
from ridgeline.workload import Workload
from strategies import make_machine


def traced(model: nn.Module, x: torch.Tensor) -> tuple[Workload, tuple[Piece, ...]]:
    """The step of a model as if it were on a GPU, and the pieces of its backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    workload = rl.trace(model, lambda model, x: model(x).square().sum(), optimizer, x)
    workload = msgspec.structs.replace(workload, device="cuda")
    priced = price_step(make_machine(device="cuda"), workload, Setting(device="cuda", workers=1))
    # As if all were far from their roofline, as small kernels on a GPU are.
    return workload, tuple(piece._replace(roofline_s=piece.work_s / 9) for piece in priced.backward)


def test_what_makes_weight_gradients_is_hidden() -> None:
    """A product for a weight, half of a convolution that computes two, all of one without a gradient of its input."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 8),
        nn.Linear(8, 3),
    )
    workload, backward = traced(model, torch.randn(2, 2, 6, 6))
    left: dict[str, list[float]] = {}
    for before, after in zip(backward, hide_weight_gradients(workload, backward), strict=True):
        if before.work_s:
            left.setdefault(before.name, []).append(after.work_s / before.work_s)
    all_, half = 1.0 - HIDDEN_SHARE, 1.0 - HIDDEN_SHARE / 2
    assert left.pop("aten.convolution_backward.default") == pytest.approx([half, all_])
    assert sorted(left.pop("aten.mm.default")) == pytest.approx([all_, all_, 1.0, 1.0])
    assert {share for shares in left.values() for share in shares} == {1.0}


def test_large_or_lonely_operators_stay_in_the_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills the GPU has no room beside it, and one operator alone is not moved."""
    workload, backward = traced(nn.Linear(4, 4, bias=False), torch.randn(2, 4))
    assert hide_weight_gradients(workload, backward) == backward
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    workload, backward = traced(model, torch.randn(2, 4))
    assert hide_weight_gradients(workload, backward) != backward
    at_roofline = tuple(piece._replace(roofline_s=piece.work_s) for piece in backward)
    assert hide_weight_gradients(workload, at_roofline) == at_roofline
    monkeypatch.setattr(beside, "BESIDE_FLOPS", 1)
    assert hide_weight_gradients(workload, backward) == backward
