"""Weight gradients on a second stream: bit for bit those of one stream, in every replay."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.execution import MODES
from ridgeline.plan import Execution, Plan
from ridgeline.runtime.hybrid import inductor
from ridgeline.runtime.hybrid.beside import gradients
from ridgeline.runtime.step import TrainStep
from ridgeline.tasks.resnet18 import ResNet18

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(execution: Execution, num_steps: int = 12) -> tuple[list[Tensor], TrainStep]:
    """The parameters and buffers after some steps, most of them replays."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ResNet18(10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    with TrainStep(model, loss_fn, optimizer, Plan(execution=execution)) as step:
        for _ in range(num_steps):
            x = torch.randn(8, 1, 16, 16, generator=generator)
            step((x.cuda(), torch.randint(0, 10, (8,), generator=generator).cuda()))
        torch.cuda.synchronize()
    return [*model.parameters(), *model.buffers()], step


@pytest.mark.parametrize("execution", ["compiled+graph", "regional+graph"])
def test_training_is_that_of_one_stream(
    monkeypatch: pytest.MonkeyPatch, execution: Execution
) -> None:
    """A race, or memory freed while the second stream reads it, would change some bits somewhere."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    moved: list[int] = []
    put_beside = gradients.put_beside

    def counted(*args: Any) -> int:
        moved.append(put_beside(*args))
        return moved[-1]

    monkeypatch.setattr(gradients, "put_beside", counted)
    monkeypatch.setattr(inductor, "replayed", lambda: inductor.PLAIN)
    want, _ = trained(execution)
    assert MODES[execution].is_replayed
    assert not moved
    beside = {**inductor.PLAIN, "post_grad_custom_post_pass": gradients.GradientsBeside()}
    monkeypatch.setattr(inductor, "replayed", lambda: beside)
    for most_kept in (gradients.MOST_KEPT_BYTES, 0):
        moved.clear()
        monkeypatch.setattr(gradients, "MOST_KEPT_BYTES", most_kept)
        monkeypatch.setattr(torch._inductor.config, "force_disable_caches", True)
        got, step = trained(execution)
        assert sum(moved) >= 8
        assert not [note for note in step.notes if "plain options" in note]
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_the_options_for_replays_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the product is: nothing falls back, and the model learns what it learns with plain options."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    got, step = trained("compiled+graph", num_steps=5)
    assert not [note for note in step.notes if "plain options" in note]
    monkeypatch.setattr(inductor, "replayed", lambda: inductor.PLAIN)
    want, _ = trained("compiled+graph", num_steps=5)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-3)
