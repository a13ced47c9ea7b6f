"""Steps whose loss needs the host: the model is replayed, and trains as the plain step does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.session import TrainStep as AutoStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Listener(nn.Module):
    """Convolutions with batch norm and dropout to log-probabilities over time."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(8, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Conv1d(32, 32, 3, padding=1),
            nn.BatchNorm1d(32),
            nn.GELU(),
        )
        self.out = nn.Linear(32, 12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"spoken": self.out(self.convolutions(x).transpose(1, 2)).log_softmax(2)}


def ctc(model: nn.Module, batch: Any) -> Tensor:
    """Its lengths are read on the host."""
    sound, texts, lengths = batch
    spoken = model(sound)["spoken"].float().transpose(0, 1)
    durations = torch.full_like(lengths, spoken.shape[0])
    return nn.functional.ctc_loss(spoken, texts, durations, lengths, zero_infinity=True)


def batch_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(4, 8, 40, generator=generator)
    texts = torch.randint(1, 12, (4, 6), generator=generator)
    lengths = torch.randint(3, 7, (4,), generator=generator)
    return sound.cuda(), texts.cuda(), lengths.cuda()


def trained(plan: Plan, steps: int = 12) -> tuple[list[float], list[Tensor], PlannedStep]:
    torch.manual_seed(0)
    model = Listener().cuda()
    # Adam would divide gradients that are nothing but rounding (biases before batch norm) by themselves.
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    with PlannedStep(model, ctc, optimizer, plan, clip_norm=1.0) as step:
        losses = [float(step(batch_of(index))) for index in range(steps)]
    state = [tensor.detach().clone() for tensor in model.state_dict().values()]
    return losses, state, step


@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_twelve_steps_equal_eager(execution: Any) -> None:
    losses, state, _ = trained(Plan(execution="eager"))
    again, found, step = trained(Plan(execution=execution))
    torch.testing.assert_close(again, losses, rtol=2e-3, atol=2e-3)
    for tensor, wanted in zip(found, state, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=2e-2, atol=2e-3)
    assert any(f"{execution} equals the eager step" in note for note in step.notes)


def test_bf16_trains() -> None:
    losses, _, _ = trained(Plan(execution="model-graph", precision="bf16"), steps=40)
    assert losses[-1] < losses[0]


def test_another_shape_runs_as_it_was_written() -> None:
    torch.manual_seed(0)
    model = Listener(0.0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with PlannedStep(model, ctc, optimizer, Plan(execution="model-graph")) as step:
        step(batch_of(0))
        sound, texts, lengths = batch_of(1)
        wanted = ctc(model, (sound[:2], texts[:2], lengths[:2]))
        got = step((sound[:2], texts[:2], lengths[:2]))
    torch.testing.assert_close(got, wanted.detach(), rtol=1e-4, atol=1e-4)


def test_results_that_somebody_keeps_stay() -> None:
    kept: list[Tensor] = []

    def once(model: nn.Module, batch: Any) -> Tensor:
        spoken = model(batch[0])["spoken"]
        kept.append(spoken.detach())
        return spoken.float().square().mean() * (2.0 if float(spoken.detach().max()) > 100 else 1.0)

    model = Listener(0.0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(model, once, optimizer, Plan(execution="model-graph")) as step:
        step(batch_of(0))
        kept.clear()
        step(batch_of(1))
        before = kept[0].clone()
        step(batch_of(2))
    assert torch.equal(kept[0], before)
    assert not torch.equal(kept[0], kept[1])


def test_two_backward_passes_are_refused() -> None:
    """Also where the code does not show that it keeps what one needs for another."""
    find = vars(torch.autograd)["gr" + "ad"]

    def penalty(model: nn.Module, batch: Any) -> Tensor:
        spoken = model(batch[0])["spoken"]
        first = spoken.square().mean()
        (slope,) = find(first, [model.out.bias], None, True)
        return first * (1.0 + float(slope.sum().item() > 1e9))

    model = Listener(0.0).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = PlannedStep(model, penalty, optimizer, Plan(execution="model-graph"))
    with step, pytest.raises(CaptureError, match="one backward pass for each call"):
        step(batch_of(0))


def test_auto_tries_it_where_no_graph_holds_the_step() -> None:
    torch.manual_seed(0)
    model = Listener().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with AutoStep(model, ctc, optimizer, "auto", seconds=60.0) as step:
        losses = [float(step(batch_of(0))) for _ in range(20)]
        tried = {c.plan.execution: c.measured for c in step.ranking.candidates if c.measured}
    assert "model-graph" in tried
    assert losses[-1] < losses[0]


def test_gradients_that_nobody_clears_add_up() -> None:
    """Of a parameter that the optimizer does not hold, as they do in the plain loop."""
    found = []
    for execution in ("eager", "model-graph"):
        torch.manual_seed(0)
        model = Listener(dropout=0.0).cuda()
        optimizer = torch.optim.SGD(model.convolutions.parameters(), 0.01)
        with PlannedStep(model, ctc, optimizer, Plan(execution=execution)) as step:
            for index in range(5):
                step(batch_of(index))
        found.append(model.out.weight.grad)
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("execution", ["model-graph", "compiled+model-graph"])
def test_gradients_that_a_step_has_left_are_not_written_over(execution: Any) -> None:
    """Neither where a parameter leaves the optimizer after replays, nor those of a batch."""
    found = []
    for name in ("eager", execution):
        torch.manual_seed(0)
        model = Listener(dropout=0.0).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        sounds = []
        with PlannedStep(model, ctc, optimizer, Plan(execution=name)) as step:
            for index in range(8):
                if index == 4:
                    optimizer.param_groups[0]["params"] = [*model.convolutions.parameters()]
                sound, texts, lengths = batch_of(index)
                sounds.append(sound.requires_grad_())
                step((sound, texts, lengths))
        found.append([model.out.weight.grad, *(sound.grad for sound in sounds)])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_another_method_of_a_class_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled model is made anew: torch's compiler trusts that a class stays as it is."""
    spoken, losses = Listener.forward, []

    def louder(self: Listener, x: Tensor) -> dict[str, Tensor]:
        return spoken(self, 3.0 * x)

    for name in ("eager", "compiled+model-graph"):
        torch.manual_seed(0)
        model = Listener(dropout=0.0).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        plan = Plan(execution=name)  # type: ignore[arg-type]
        with monkeypatch.context() as patch, PlannedStep(model, ctc, optimizer, plan) as step:
            for index in range(6):
                if index == 3:
                    patch.setattr(Listener, "forward", louder)
                losses.append(float(step(batch_of(index))))
    torch.testing.assert_close(losses[6:], losses[:6], rtol=2e-3, atol=2e-3)
