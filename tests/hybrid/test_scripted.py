"""Functions of TorchScript in programs that are traced: on a GPU their fused kernels read memory as it is."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import ridgeline as rl
from emulated_graphs import emulated_graphs
from ridgeline.capture.interception import scripted_as_written
from ridgeline.errors import CaptureError, ObstacleError
from ridgeline.plan import Execution

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`")
SEEN: list[bool] = []


@torch.jit.ignore
def note(x: Tensor) -> Tensor:
    """Whether a tensor has no memory, which TorchScript's executor does not ask."""
    SEEN.append(isinstance(x, FakeTensor) or torch._is_functional_tensor(x))
    return x


def as_written(x: Tensor, by: float) -> Tensor:
    return torch.relu(x) * by


def noted(x: Tensor, by: float) -> Tensor:
    return note(torch.relu(x)) * by


class Net(nn.Module):
    def __init__(self, program: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        return self.program(self.lin(x), 2.0)


@pytest.fixture
def net() -> Iterator[Net]:
    SEEN.clear()
    scripted = torch.jit.script(noted)
    scripted._torchdynamo_inline = as_written
    yield Net(scripted)
    SEEN.clear()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def called(net: Net) -> None:
    x = torch.ones(3, 4)
    assert torch.allclose(rl.hybridize(net, x, mode="compiled")(x), net(x).detach())


def traced(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    rl.trace(net, loss, optimizer, torch.ones(3, 4))


def trained(net: Net) -> None:
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with rl.TrainStep(net, loss, optimizer, rl.Plan(execution="step-graph"), device="cpu") as step:
        step(torch.ones(3, 4))


@pytest.mark.parametrize("use", [called, traced, trained])
def test_no_scripted_function_is_called_on_tensors_without_memory(
    use: Callable[[Net], None], net: Net
) -> None:
    use(net)
    assert not any(SEEN)


@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_a_module_of_torchscript_is_refused_by_name(execution: Execution) -> None:
    """Its list of modules gives no keys."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 1)))
    plan = rl.Plan(execution=execution)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with (
        emulated_graphs(),
        rl.TrainStep(model, loss, optimizer, plan, device="cpu") as step,
        pytest.raises(ObstacleError, match="got one of TorchScript in '1', whose"),
    ):
        step(torch.ones(3, 4))


def test_a_scripted_method_is_not_called_on_tensors_without_memory() -> None:
    """Where the tensors stand for some of a GPU; a CPU's executor fuses nothing."""
    method = torch.jit.script(nn.Linear(4, 1))
    with scripted_as_written():
        assert method(torch.ones(3, 4)).shape == (3, 1)
        with pytest.raises(CaptureError, match="got 'forward' of a module of TorchScript"):
            method(torch.ones(3, 4, device="meta"))
