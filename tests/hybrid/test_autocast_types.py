"""The type that autocast computes in where code does not say which: a setting of the process."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls.reads import CallReads


@pytest.fixture(autouse=True)
def same_type() -> Iterator[None]:
    """Put back."""
    before = torch.get_autocast_dtype("cpu")
    yield
    torch.set_autocast_dtype("cpu", before)


class Net(nn.Module):
    """Enters autocast itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """In the type of the process."""
        with torch.autocast("cpu"):
            return self.linear(x).float()


def test_what_was_read_holds_for_one_type() -> None:
    """So that captured forms are made anew."""
    model, x = Net(), torch.randn(2, 4)
    arguments = {"fn": model, "args": (x,)}
    with torch.no_grad():
        guards = CallReads(model, (x,)).guards
        assert guards.holds(dict(arguments))
        torch.set_autocast_dtype("cpu", torch.float16)
        assert not guards.holds(dict(arguments))
