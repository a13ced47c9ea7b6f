"""A small network, its loss, and a stand-in for the captures of a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.model_graphs.form import ModelGraphForm
from ridgeline.state.saved_state import module_kept


class Net(nn.Module):
    """Two layers with batch norm; its result is a dict with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"scores": self.out(self.norm(self.hidden(x)).relu()) * scale, "width": 8}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    """Which class is largest is asked on the host, as a matcher would."""
    scores = model(batch[0], scale=2.0)["scores"]
    weight = 1.0 if int(scores.argmax()) % 2 else 1.5
    return weight * nn.functional.cross_entropy(scores, batch[1])


def batch_of(seed: int, size: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


@dataclass
class StandIn:
    """Records captures, which call as a real one does; replays by calling."""

    num_captures: int = 0
    num_replays: int = 0
    num_closed: int = 0

    def __call__(
        self, model: nn.Module, run: Callable[..., Any], plain: Callable[..., Any], tensors: Any
    ) -> "Replaying":
        self.num_captures += 1
        with module_kept(model, parameters=False):
            run(*tensors)
        return Replaying(self, run)


@dataclass
class Replaying:
    owner: StandIn
    run: Callable[..., Any]

    def __call__(self, *tensors: Tensor) -> Any:
        assert torch.is_grad_enabled()
        self.owner.num_replays += 1
        return self.run(*tensors)

    def close(self) -> None:
        self.owner.num_closed += 1


def make(model: nn.Module, loss: Any = loss_fn) -> tuple[ModelGraphForm, StandIn, list[str]]:
    stand_in, notes = StandIn(), []
    form = ModelGraphForm(loss, model, None, notes=notes, capture=stand_in)
    return form, stand_in, notes


def run(form: ModelGraphForm, model: nn.Module, batch: Any) -> Tensor:
    with form.active():
        loss = form(model, batch)
    loss.backward()
    return loss.detach()
