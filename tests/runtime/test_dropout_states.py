"""What cuDNN's recurrent layers draw from is held by whoever captures them."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.plan import Plan
from ridgeline.runtime import captured_step, dropout_states
from ridgeline.runtime.body import StepBody
from ridgeline.runtime.captured_step import CapturedStep
from ridgeline.runtime.dropout_states import DropoutStateSeen

META: dict[str, Any] = {"device": "meta"}


def test_the_state_of_a_recurrent_layer_is_seen() -> None:
    """That of its last call; other operators have none."""
    x, states = torch.zeros(1, 1, 1, **META), [torch.zeros(8, **META) for _ in range(2)]
    weights = [torch.zeros(4, 1, **META) for _ in range(2)]
    with DropoutStateSeen() as seen:
        assert x.add(x) is not None
        assert seen.state is None
        for state in states:
            sizes = (2, 1, 0, 1, False, 0.5, True, False, [])
            torch.ops.aten._cudnn_rnn.default(x, weights, 2, None, x, x, *sizes, state)
    assert seen.state is states[1]


@pytest.mark.parametrize(
    ("device", "dropout", "training", "count"),
    [
        ("cuda:0", 0.5, True, 1),
        ("cuda:0", 0.0, True, 0),
        ("cuda:0", 0.5, False, 0),
        ("cpu", 0.5, True, 0),
    ],
)
def test_states_are_those_of_layers_that_drop(
    monkeypatch: pytest.MonkeyPatch, device: str, dropout: float, training: bool, count: int
) -> None:
    """One for each GPU, however many layers it has, deep inside a model; none for those that drop nothing."""
    monkeypatch.setattr(dropout_states, "_dropout_state", str)
    place = torch.device(device)
    weight = SimpleNamespace(is_cuda=place.type == "cuda", device=place)
    layers = [nn.GRU(2, 2, 2, dropout=dropout) for _ in range(2)]
    monkeypatch.setattr(nn.GRU, "parameters", lambda _: [weight, weight])
    model = nn.Sequential(nn.ModuleDict({"inner": nn.Sequential(*layers)}), nn.ReLU())
    model.train(training)
    assert dropout_states.dropout_states(model.modules()) == ["cuda:0"] * count


def test_a_captured_step_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are asked for before the capture begins, also those of networks that only the loss reaches."""
    order: list[Any] = []
    teacher = nn.LSTM(1, 1)

    def states(modules: list[nn.Module]) -> list[str]:
        order.append({type(module) for module in modules})
        return ["the state"]

    @contextlib.contextmanager
    def capturing(*_: object, **__: object) -> Iterator[None]:
        order.append("capture")
        yield

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum() + teacher(batch)[0].sum()

    monkeypatch.setattr(captured_step, "dropout_states", states)
    monkeypatch.setattr(captured_step, "capturing", capturing)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: None)
    model = nn.Linear(1, 1)
    body = StepBody(
        model,
        loss_fn,
        torch.optim.SGD(model.parameters(), 0.1),
        Plan(),
        None,
        clip_norm=None,
        device=torch.device("cpu"),
    )
    stream: Any = None
    step: Any = CapturedStep(body, torch.ones(1, 1), stream, None, has_stamps=False)
    assert order == [{nn.Linear, nn.LSTM}, "capture"]
    assert step._held == ["the state"]
