"""Weight gradients on a second stream: those of one stream, in every replay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Execution, Plan
from ridgeline.runtime.hybrid import inductor
from ridgeline.runtime.hybrid.beside import gradients
from ridgeline.runtime.step import TrainStep
from ridgeline.tasks.resnet18 import ResNet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_STEPS = 20


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def gradients_of(execution: Execution) -> tuple[list[list[Tensor]], TrainStep]:
    """The gradients of each of some steps, most of them replays, that leave the parameters as they are."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # In double precision: rounding that batch norm amplifies and a ReLU turns into a jump stays far below a race.
    model = ResNet18(10).cuda().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    generator = torch.Generator().manual_seed(1)
    found = []
    with TrainStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
        for _ in range(NUM_STEPS):
            x = torch.randn(8, 1, 16, 16, generator=generator)
            step((x.cuda().double(), torch.randint(0, 10, (8,), generator=generator).cuda()))
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    return found, step


def check_same(got: list[list[Tensor]], want: list[list[Tensor]]) -> None:
    """But for rounding: a race would give other numbers altogether."""
    assert len(got[-1]) == len(want[-1]) > 50
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())


@pytest.mark.parametrize("execution", ["compiled+graph", "regional+graph"])
def test_gradients_are_those_of_one_stream(
    monkeypatch: pytest.MonkeyPatch, execution: Execution
) -> None:
    """Also where both streams are joined after every operator; and nothing falls back to plain options."""
    moved: list[int] = []
    put_beside = gradients.put_beside

    def counted(*args: Any) -> int:
        moved.append(put_beside(*args))
        return moved[-1]

    monkeypatch.setattr(gradients, "put_beside", counted)
    monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
    with monkeypatch.context() as patch:
        patch.setattr(inductor, "replayed_options", lambda: inductor.PLAIN)
        want, _ = gradients_of(execution)
    assert not moved
    for most_kept in (gradients.MOST_KEPT_BYTES, 0):
        moved.clear()
        monkeypatch.setattr(gradients, "MOST_KEPT_BYTES", most_kept)
        got, step = gradients_of(execution)
        assert sum(moved) >= 8
        assert not [note for note in step.notes if "plain options" in note]
        check_same(got, want)
