"""Views in traced programs are views or copies, whichever the compiler's memory allows, where nobody writes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ridgeline as rl
from adversary.interpreting import interpreted
from ridgeline.programs.reshaping import reshaping

aten = torch.ops.aten


class Cached(nn.Module):
    """Attention's keys behind those of earlier calls, of which there are none in training."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)
        self.past = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        keys = self.key(x).view(batch, length, 2, 4).transpose(1, 2)
        keys = torch.cat([self.past, keys], -2)
        return keys.view(batch * 2, length, 4).sum(-1)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def losses(plan: rl.Plan) -> list[float]:
    torch.manual_seed(0)
    model = Cached()
    with rl.TrainStep(
        model, mean_square, torch.optim.SGD(model.parameters(), 0.1), plan=plan, device="cpu"
    ) as step:
        return [float(step(torch.randn(3, 5, 8))) for _ in range(4)]


@pytest.mark.parametrize("execution", ["step-graph", "packaged"])
@pytest.mark.filterwarnings("ignore:Your compiler for AOTAutograd")  # an interpreter is none
@interpreted()
def test_a_concatenation_with_nothing_is_viewed(execution: rl.plan.Execution) -> None:
    """As in GPT-2 of transformers with dropout, which was refused."""
    assert losses(rl.Plan(execution=execution)) == pytest.approx(losses(rl.Plan()), rel=1e-5)


def viewed(x: Tensor) -> Tensor:
    return (x * 2.0).view(-1) + 1.0


def written_in_a_view(x: Tensor) -> Tensor:
    y = x * 2.0
    y.view(-1).add_(1.0)
    return y


def written_beneath_a_view(x: Tensor) -> Tensor:
    y = x * 2.0
    flat = y.view(-1)
    y.transpose(0, 1).mul_(3.0)
    return flat


def written_in_parts(x: Tensor) -> Tensor:
    y = x * 2.0
    flat = y.view(-1)
    first, _ = y.split(1)
    first.zero_()
    return flat


def written_in_lists(x: Tensor) -> Tensor:
    y, z = x * 2.0, x * 3.0
    flat = y.view(-1)
    torch._foreach_add_([z, y], 1.0)
    return flat + z.view(-1)


def written_by_name(x: Tensor) -> Tensor:
    y = x * 2.0
    flat = y.view(-1)
    torch.mul(x, 5.0, out=y)
    return flat


@pytest.mark.parametrize(
    ("function", "num_views"),
    [
        (viewed, 0),
        (written_in_a_view, 1),
        (written_beneath_a_view, 1),
        (written_in_parts, 1),
        (written_in_lists, 2),
        (written_by_name, 1),
    ],
)
def test_what_is_written_stays_a_view(function: Callable[[Tensor], Tensor], num_views: int) -> None:
    """And the program it was made from stays as it was."""
    x = torch.randn(2, 3)
    graph = make_fx(function)(x)
    before = graph.code
    made = reshaping(graph)
    views = made.graph.find_nodes(op="call_function", target=aten.view.default)
    assert len(views) == num_views
    assert graph.code == before
    assert torch.equal(made(x), function(x))
