"""Callables that torch compiles in pieces, whose classes change."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).tanh()


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        return x * 2.0 if float(x.sum()) > 0 else x + 1.0


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted():
        yield


def test_another_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a branch on data makes the compiler read in several pieces, with nothing but its own guards."""
    torch.manual_seed(0)
    model, x = Branching(), torch.randn(3, 4)
    with torch.no_grad():
        fast = rl.hybridize(model, (x,), mode="compiled")
        torch.testing.assert_close(fast(x), model(x))
        monkeypatch.setattr(Part, "forward", lambda part, x: part.lin(x).relu())
        torch.testing.assert_close(fast(x), model(x))
