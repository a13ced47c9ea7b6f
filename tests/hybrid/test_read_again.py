"""Captures that are made anew, and read what is there then and nothing else."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.callables.calls.reads import CallReads
from ridgeline.errors import CaptureError

PAIR = (1.0, 2)
makes_anew = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="before torch 2.13 its compiler makes tuples and nan anew"
)


class Net(nn.Module):
    """Computes with what a test reads."""

    def __init__(self, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.scale = read, 2.0
        self.pair, self.nan = PAIR, math.nan

    def forward(self, x: Tensor) -> Tensor:
        """What the test makes of it."""
        return self.read(self, x)


def test_what_checkpoints_compute_is_captured_again() -> None:
    """Their operators are in a graph of their own, inside of that of the program."""

    def read(net: Any, x: Tensor) -> Any:
        return checkpoint(lambda y: y * net.scale, x, use_reentrant=False)

    net, x = Net(read), torch.arange(1.0, 4.0)
    with interpreted(), torch.no_grad(), rl.hybridize(net, x, mode="compiled") as fast:
        assert torch.equal(fast(x), x * 2.0)
        net.scale = 3.0
        assert torch.equal(fast(x), x * 3.0)


@makes_anew
def test_a_tuple_is_the_one_that_it_is() -> None:
    """Torch's compiler makes each anew, so that none would be another."""
    net, x = Net(lambda n, x: x * (2.0 if n.pair is PAIR else 1.0)), torch.arange(1.0, 4.0)
    with interpreted(), torch.no_grad(), rl.hybridize(net, x, mode="compiled") as fast:
        assert torch.equal(fast(x), x * 2.0)
        net.pair = (*list(PAIR),)
        assert torch.equal(fast(x), x)
        net.pair = PAIR
        assert torch.equal(fast(x), x * 2.0)


@makes_anew
def test_nan_as_a_key_is_left_to_python() -> None:
    """Which asks whether it is that very object."""
    net, x = Net(lambda n, x: x * (2.0 if n.nan in {n.nan: 1} else 1.0)), torch.arange(1.0, 4.0)
    with torch.no_grad(), pytest.raises(CaptureError, match="nan looked up in a dictionary or set"):
        CallReads(net, (x,))
