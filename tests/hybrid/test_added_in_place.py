"""`self.count += 1` assigns the tensor that was there: no other one, which a captured program could not do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from ridgeline.guards.settled import WritingError

pytestmark = pytest.mark.usefixtures("compiler_begins_anew")


class Counting(nn.Module):
    """Counts its calls in a buffer, and adds up what it has seen in a tensor that is none."""

    def __init__(self, count: Callable[["Counting", Tensor], None]) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.total = torch.zeros(4)
        self.layer, self.count = nn.Linear(4, 4), count

    def forward(self, x: Tensor) -> Tensor:
        self.count(self, x)
        return self.layer(x) / self.calls


def in_place(net: Any, x: Tensor) -> None:
    net.calls += 1
    net.total += x.sum(0)


def by_name(net: Any, x: Tensor) -> None:
    net.calls = net.calls.add_(1)
    net.total = net.total.add_(x.sum(0))


@pytest.mark.parametrize("count", [in_place, by_name])
def test_tensors_that_a_module_adds_to_count_every_call(count: Any) -> None:
    torch.manual_seed(0)
    net, same = Counting(count), Counting(count)
    same.load_state_dict(net.state_dict())
    with rl.hybridize(net, torch.ones(2, 4), "compiled") as fast, torch.no_grad():
        for number in range(3):
            x = torch.full((2, 4), float(number))
            torch.testing.assert_close(fast(x), same(x))
        assert fast.report.counters["eager_calls"] == 0
        torch.testing.assert_close((net.calls, net.total), (same.calls, same.total))


def other_buffer(net: Any, _: Tensor) -> None:
    net.calls = net.calls + 1


def other_tensor(net: Any, x: Tensor) -> None:
    net.calls += 1
    net.total = net.total + x.sum(0)


def another_one_of_its_own(net: Any, _: Tensor) -> None:
    net.calls += 1
    net.total = net.calls


@pytest.mark.parametrize("count", [other_buffer, other_tensor, another_one_of_its_own])
def test_another_tensor_in_its_place_is_refused(count: Any) -> None:
    with pytest.raises(WritingError, match="got one that writes Counting"):
        rl.hybridize(Counting(count), torch.ones(2, 4), "compiled")
