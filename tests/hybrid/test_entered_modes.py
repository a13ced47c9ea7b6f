"""A program that enters modes of torch functions and leaves them again changes nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ridgeline.callables.calls.reads import CallReads
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError


class Doubling(TorchFunctionMode):
    """`tanh` gives twice as much inside."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.tanh else result


def within(x: Tensor) -> Tensor:
    """As libraries of language models do around the indexing of their masks."""
    with Doubling():
        doubled = torch.tanh(x)
    return torch.tanh(x) + doubled


def setting(x: Tensor) -> Tensor:
    torch.set_default_device("cpu")
    return torch.tanh(x)


def test_a_mode_that_is_left_again_is_no_change() -> None:
    """Such a program is captured, and follows a mode that the caller enters around it."""
    x = torch.randn(4)
    with hybridize(within, x, "script") as hybrid:
        assert torch.equal(hybrid(x), within(x))
        with Doubling():
            assert torch.equal(hybrid(x), within(x))
        assert torch.equal(hybrid(x), within(x))
        assert hybrid.report.counters == {"eager_calls": 0, "shapes": 2, "rebuilds": 0}


def test_a_mode_that_stays_is_a_change() -> None:
    """A default device is one: a captured program would not set it."""
    with pytest.raises(CaptureError, match="the modes of torch functions in force"):
        CallReads(setting, (torch.randn(4),))
