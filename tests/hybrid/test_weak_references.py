"""Tensors that a program finds by a weak reference, which what is captured must not keep alive."""

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import ridgeline as rl
from adversary.interpreting import interpreted
from emulated_graphs import emulated_graphs
from ridgeline.errors import CaptureError
from ridgeline.plan import Execution

REFUSED = (
    r"got one by a weak reference \((fn|model)\.seen\(\)\), which a captured program would keep"
)


class Net(nn.Module):
    """Scales by a tensor that somebody holds, or by 5 once nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin = nn.Linear(4, 4)
        self.scale = torch.ones(4)
        self.seen = weakref.ref(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        found = self.seen()
        return self.lin(x) * (5.0 if found is None else found)


@pytest.fixture(autouse=True)
def _without_code() -> Iterator[None]:
    with interpreted(), emulated_graphs():
        yield


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def test_a_hybrid_leaves_it_to_whoever_holds_it() -> None:
    """Where torch's compiler reads it at each call; one that would hold it is refused."""
    net, x = Net(), torch.ones(2, 4)
    with torch.no_grad():
        with pytest.raises(CaptureError, match=REFUSED):
            rl.hybridize(net, x, mode="graph")
        fast = rl.hybridize(net, x, mode="compiled")
        for _ in range(2):
            torch.testing.assert_close(fast(x), net(x))
        net.scale = torch.zeros(4)
        got = fast(x)
        assert net.seen() is None
        torch.testing.assert_close(got, net.lin(x) * 5.0)


def train(net: nn.Module, execution: Execution) -> None:
    optimizer, plan = torch.optim.SGD(net.parameters(), 0.1), rl.Plan(execution=execution)
    with rl.TrainStep(net, loss, optimizer, plan, device="cpu") as step:
        for _ in range(4):
            step(torch.ones(2, 4))


@pytest.mark.parametrize("execution", ["step-graph", "graph", "model-graph"])
def test_a_step_that_would_hold_it_is_refused(execution: Execution) -> None:
    net = Net()
    with pytest.raises(CaptureError, match=REFUSED):
        train(net, execution)
    net.scale = torch.zeros(4)
    assert net.seen() is None
