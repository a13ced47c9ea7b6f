"""Hooks of callables: of equal blocks, and of all modules."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from adversary.interpreting import interpreted
from ridgeline.callables.hybridize import hybridize


class Block(nn.Module):
    """Adds something to the input of a layer, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.more = nn.Linear(4, 4), nn.Linear(4, 4), 1.0
        self.second.register_forward_pre_hook(lambda _, args: (args[0] + self.more,))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_equal_blocks_have_hooks_of_their_own() -> None:
    """They share what is compiled for one of them; the check and later calls compile as well."""
    model, x = nn.Sequential(Block(), Block()), torch.randn(3, 4)
    with hybridize(model, x, "regional", max_shapes=4) as hybrid, torch.no_grad():
        torch.testing.assert_close(hybrid(x), model(x))
        model[0].second._forward_pre_hooks.clear()
        for rows in (3, 5, 3):
            y = torch.randn(rows, 4)
            torch.testing.assert_close(hybrid(y), model(y))
        assert hybrid.report.counters["eager_calls"] == 0


def test_hooks_of_all_modules_are_not_called_around_a_package() -> None:
    """What they do to the user's modules is in the program; that is a module of nobody's."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    with interpreted(), hybridize(model, x, "packaged", max_shapes=4) as hybrid, torch.no_grad():
        handle = register_module_forward_hook(lambda _, __, out: out * 1.5)
        try:
            torch.testing.assert_close(hybrid(x), model(x))
        finally:
            handle.remove()
        torch.testing.assert_close(hybrid(x), model(x))
        assert hybrid.report.counters["eager_calls"] == 0
