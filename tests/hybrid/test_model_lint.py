"""What keeps a model out of a graph: host reads, hidden Python state, and losses that set what it reads."""

from typing import Any

import pytest
import torch
from replayed_models import Net, batch_of, loss_fn, make, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ridgeline.errors import ObstacleError
from ridgeline.lint.lint import check_capturable
from ridgeline.model_graphs.inspection import inspect_model


def lint_of(model: nn.Module, *inputs: Tensor) -> Any:
    return inspect_model(model, lambda *x: (model(*x),), inputs, device="cpu")


def test_what_a_model_reads_on_the_host_is_found_and_its_state_is_put_back() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.layer(x))
            return y * 2 if y.sum().item() > 0 else y

    model = Reads()
    before, state = model.norm.running_mean.clone(), torch.get_rng_state()
    lint = lint_of(model, batch_of(0)[0])
    with pytest.raises(ObstacleError, match="item"):
        check_capturable(lint.findings)
    assert torch.equal(model.norm.running_mean, before)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_a_hidden_state_in_python_is_found() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.count = nn.Linear(6, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(x) / self.count

    lint = lint_of(Counts(), batch_of(0)[0])
    assert any("count" in str(finding) for finding in lint.findings)


def test_a_plain_model_has_no_obstacles() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    lint = lint_of(model, batch_of(0)[0])
    assert (lint.findings, lint.doubts) == ((), ())


def test_arguments_that_change_in_place_and_results_without_gradients_are_refused() -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.mul_(2.0))

    class Detached(Changes):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).detach()

    with pytest.raises(ObstacleError, match="got Changes, which changes one in place"):
        lint_of(Changes(), batch_of(0)[0])
    with pytest.raises(ObstacleError, match="got none from Detached"):
        lint_of(Detached(), batch_of(0)[0])


def test_a_buffer_that_a_model_replaces_is_found() -> None:
    class Moves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
            return y - self.mean

    model = Moves()
    before = model.mean
    assert lint_of(model, batch_of(0)[0]).findings
    assert model.mean is before


class Tempered(Net):
    """Reads a number and a hidden state that others set."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.state = 1.0, torch.zeros(8)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.norm(self.hidden(x)).relu() + self.state
        return {"scores": self.out(hidden) / self.temperature * scale, "hidden": hidden}


def set_temperature(model: nn.Module, batch: Any) -> Tensor:
    model.temperature *= 0.999
    return loss_fn(model, batch)


def hand_on(model: nn.Module, batch: Any) -> Tensor:
    result = model(batch[0])
    model.state = result["hidden"].mean(0).detach()
    return nn.functional.cross_entropy(result["scores"], batch[1])


def set_mask(model: nn.Module, batch: Any) -> Tensor:
    model.state = batch[0].new_zeros(8)
    return loss_fn(model, batch)


class Counting:
    """A loss that counts for itself, and shows what it saw."""

    def __init__(self) -> None:
        self.count, self.shown = 0, None

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.count += 1
        loss = loss_fn(model, batch)
        self.shown = loss.detach()
        return loss / self.count


@pytest.mark.parametrize(
    ("loss", "what"), [(set_temperature, "temperature"), (hand_on, "state"), (set_mask, "state")]
)
def test_what_a_loss_sets_and_the_model_reads_is_refused(loss: Any, what: str) -> None:
    """A replayed model would read what it read at the capture, and slowly go wrong."""
    model = Tempered()
    temperature, state = model.temperature, model.state
    form, stand_in, _ = make(model, loss)
    with pytest.raises(ObstacleError, match=f"leaves alone what Tempered names.*{what}"):
        run(form, model, batch_of(0))
    assert stand_in.num_captures == 0
    assert model.temperature == temperature
    assert model.state is state


def test_a_loss_may_count_for_itself() -> None:
    """It runs as it was written; the look at it leaves no trace."""
    model, loss = Net(), Counting()
    form, stand_in, _ = make(model, loss)
    for number in (1, 2):
        run(form, model, batch_of(0))
        assert loss.count == number
    assert (stand_in.num_captures, stand_in.num_replays) == (1, 2)


def test_reentrant_checkpoints_are_refused_and_others_are_not() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, is_reentrant: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 4)
            self.is_reentrant = is_reentrant

        def forward(self, x: Tensor) -> Tensor:
            inner = checkpoint(self.last, self.first(x), use_reentrant=self.is_reentrant)
            return self.last(inner)

    with pytest.raises(ObstacleError) as caught:
        lint_of(Checkpointed(True), batch_of(0)[0])
    assert str(caught.value) == (
        "wanted activation checkpoints that a graph of Checkpointed can hold, got torch.utils.checkpoint with "
        "use_reentrant=True, which takes a backward pass of its own; give it use_reentrant=False, or use "
        "another execution mode"
    )
    assert lint_of(Checkpointed(False), batch_of(0)[0]).findings == ()
