"""A model whose `parameters` is its own, with no arguments, trains: many written before 2020 have one."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ridgeline as rl
from ridgeline.reach.reach import Reach


class Learner(nn.Module):
    """Its weights in a list, which its `parameters` gives out, as those of MAML's code do."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((8, 4), (8,), (2, 8), (2,))
        self.vars = nn.ParameterList(nn.Parameter(torch.randn(shape) / 4) for shape in shapes)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, rows: Tensor, fast: Any = None) -> Tensor:
        first, bias, second, last = self.vars if fast is None else fast
        return F.linear(F.linear(rows, first, bias).tanh(), second, last) * self.scale

    def parameters(self) -> Any:  # type: ignore[override]
        return self.vars

    def buffers(self) -> Any:  # type: ignore[override]
        return [self.scale]


def loss_fn(model: Any, batch: Any) -> Tensor:
    """One step of its own on half of the rows, and the loss of the others behind it."""
    rows, wanted = batch
    gradients = torch.autograd.grad(
        F.cross_entropy(model(rows[::2]), wanted[::2]), model.parameters()
    )
    fast = [p - 0.4 * g for p, g in zip(model.parameters(), gradients, strict=True)]
    return F.cross_entropy(model(rows[1::2], fast), wanted[1::2])


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Learner()
    return model, torch.optim.Adam(model.parameters(), 1e-2)


@pytest.mark.parametrize("plan", ["auto", rl.Plan()], ids=["auto", "eager"])
def test_it_trains_as_in_a_plain_loop_bit_for_bit(plan: Any) -> None:
    batches = [(torch.randn(8, 4), torch.randint(2, (8,))) for _ in range(4)]
    model, optimizer = make()
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    ours, ours_optimizer = make()
    with rl.TrainStep(
        ours, loss_fn, ours_optimizer, plan, device="cpu", seconds=5.0, progress=str, clip_norm=1e9
    ) as step:
        for batch in batches:
            step(batch)
    for mine, theirs in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("is_scripted", [False, True])
def test_parameters_and_buffers_are_reached_without_its_methods(is_scripted: bool) -> None:
    model: nn.Module = nn.BatchNorm1d(3) if is_scripted else Learner()
    held = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    reach = Reach(torch.jit.script(model) if is_scripted else model)
    assert held <= {t.data_ptr() for t in reach.tensors}
