"""What a step changes around itself ends with it, also where it cannot be made, or ends badly."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.errors import CaptureError
from ridgeline.plan import Plan
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.steps.body.body import StepBody
from ridgeline.runtime.steps.body.tf32 import allowing_tf32, tf32_settings
from ridgeline.runtime.steps.runners import EagerRunner
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.runtime.steps.step_identity import step_identity


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def test_a_step_that_cannot_be_made_leaves_everything_as_it_was() -> None:
    """Memory of weights and the number of threads: the next plan may be tried with the same model."""
    model, before = Net(), torch.get_num_threads()
    strides = model.conv.weight.stride()
    try:
        torch.set_num_threads(1)
        plan = Plan(execution="regional", memory_format="channels_last", threads=2)
        with pytest.raises(CaptureError, match="wanted a model with repeated blocks"):
            PlannedStep(model, nn.Module.__call__, sgd(model), plan, device="cpu")
        assert torch.get_num_threads() == 1
        assert model.conv.weight.stride() == strides
    finally:
        torch.set_num_threads(before)


def test_all_ends_where_one_thing_fails_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of a lost device cannot be dropped; weights lie as they did all the same."""

    def lost(self: EagerRunner) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(EagerRunner, "close", lost)
    model = Net()
    strides = model.conv.weight.stride()
    plan = Plan(memory_format="channels_last")
    step = PlannedStep(model, nn.Module.__call__, sgd(model), plan, device="cpu")
    assert model.conv.weight.stride() != strides
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        step.close()
    assert model.conv.weight.stride() == strides
    step.close()


def test_tf32_ends_with_the_last_that_holds_it() -> None:
    """Of two holders the first may leave first; then the process is as exact as it was."""
    before = tf32_settings()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    with second, first:
        first.enter_context(allowing_tf32())
        second.enter_context(allowing_tf32())
        first.close()
        assert tf32_settings() == (True, True)
    assert tf32_settings() == before


def test_a_step_is_described_whichever_names_tf32_was_set_by() -> None:
    """Torch refuses to say by its older names what was set by the newer ones."""
    model = Net()
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    try:
        matmul.fp32_precision = "tf32"
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            assert matmul.allow_tf32
        texts = step_identity(model, nn.Module.__call__, sgd(model), torch.ones(1, 3, 4, 4))
        assert "True" in texts
    finally:
        matmul.allow_tf32 = before


def test_a_lazy_layer_has_an_identity_before_its_first_batch() -> None:
    """Without a shape; asking for it was an error of torch's, and ended a choice of plans before it began."""
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1))
    texts = step_identity(model, nn.Module.__call__, sgd(model), torch.ones(2, 3))
    assert "0.weight: ? torch.float32 cpu True" in texts


def test_the_exact_step_of_a_plan_in_tf32_is_in_single_precision() -> None:
    """What TF32 rounds off is measured by it, and would be nothing if both were in TF32."""
    model, seen = Net(), list[tuple[bool, bool]]()

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        seen.append(tf32_settings())
        return model(batch)

    body = StepBody(
        model,
        loss_fn,
        sgd(model),
        Plan(precision="tf32"),
        None,
        clip_norm=None,
        device=torch.device("cpu"),
    )
    with allowing_tf32():
        for precision in (None, "as-is"):
            with body.as_written(precision=precision):  # type: ignore[arg-type]
                body(torch.ones(1, 3, 4, 4), Recorder(HostClock()))
    assert seen == [(True, True), (False, False)]
