"""Tensors that a step leaves under names, in steps as one program: after each step they are the plain loop's."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from step_pairs import batch_of, pair_of, sgd
from torch import Tensor, nn
from torch.nn.utils import prune

from ridgeline.errors import CaptureError, PackageError
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.usefixtures("interpreted")


class Output(NamedTuple):
    """What a network gives, as libraries write it."""

    scores: Tensor
    name: str


class Leaving(nn.Module):
    """Leaves tensors as networks do: what it saw, the same twice, lists, logs, a batch and a weight."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.back = nn.Linear(6, 3), nn.Linear(3, 3)
        self.features: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.logs: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x)
        self.last = scores
        self.attention = scores.softmax(-1).detach()
        self.features.append(self.attention)
        self.logs = {"scores": (scores, scores[0]), "name": "inner"}
        self.output = Output(scores, "inner")
        self.cache["norm"] = self.inner.weight.norm()
        self.seen, self.first, self.weights = x, x[:, 0], self.inner.weight
        return self.back(scores)


def shown(model: Any) -> list[Tensor]:
    logs = model.logs["scores"]
    return [
        model.last,
        model.attention,
        model.output.scores,
        *logs,
        *model.cache.values(),
        model.first,
        model.seen,
    ]


def test_what_a_step_leaves_is_what_the_plain_loop_leaves() -> None:
    """Values, whether they require gradients, which are one, and what readers keep: all of it."""
    kept = list[Tensor]()
    with pair_of(Leaving, sgd) as pair:
        for index in range(5):
            pair.run(index)
            models: list[Any] = [step.model for step in pair]
            for mine, theirs in zip(*map(shown, models), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
                assert mine.requires_grad == theirs.requires_grad
            for model in models:
                assert len(model.features) == 1
                assert model.features.pop() is model.attention
                assert model.logs["scores"][0] is model.last
                assert model.weights is model.inner.weight
            kept.append(models[0].attention)
            models[0].attention = models[1].attention = None
        assert len({tensor.data_ptr() for tensor in kept}) == 5
        assert "recaptures" not in pair.counters()
        assert "eager_steps" not in pair.counters()
        with torch.no_grad():
            models[0].last.mul_(2.0)
        with pytest.raises(CaptureError) as caught:
            models[0].last.sum().backward()
    assert str(caught.value) == (
        "wanted a backward pass within the step, got one from a tensor that a step kept, whose graph stayed "
        "inside of the step's one program; add it to the loss, or use execution='compiled' or 'eager'"
    )


class Layered(nn.Module):
    """Keeps a hidden state for each layer, in a dictionary that it makes anew in each step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 4), nn.Linear(4, 3)
        self.hidden: dict[nn.Module, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        self.hidden = {self.inner: hidden.detach(), self.outer: self.outer(hidden).detach()}
        return self.outer(hidden.relu())


def test_dictionaries_by_layer() -> None:
    """Their keys are the model's layers themselves, by which the script looks them up."""
    with pair_of(Layered, sgd) as pair:
        pair.train(4, {})
        for model in map(_model, pair):
            assert [*model.hidden] == [model.inner, model.outer]
        assert "eager_steps" not in pair.counters()


class Emptying(nn.Linear):
    """Empties in each step what a script puts into it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(6, 3)
        self.extras: list[Any] = []
        self.named: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.extras, self.named = [], {}
        return super().forward(x)


class Counting(Emptying):
    """Keeps numbers in a list of its own."""

    def forward(self, x: Tensor) -> Tensor:
        self.extras = [x.shape[0]]
        return super(Emptying, self).forward(x)


def test_containers_that_a_step_empties() -> None:
    with pair_of(Emptying, sgd) as pair:
        for index in range(4):
            pair.run(index)
            for model in map(_model, pair):
                assert (model.extras, model.named) == ([], {})
                model.extras.append(index)
                model.named["index"] = index
        assert "eager_steps" not in pair.counters()
    with (
        pair_of(Counting, sgd) as pair,
        pytest.raises(CaptureError, match="one that changes model"),
    ):
        pair.train(2, {})


NOTING = """
KNOWN = {}

def flat(x):
    if KNOWN.get(type(x)) is None:
        KNOWN[type(x)] = True
    return x.flatten()
"""


class Flattening(nn.Module):
    """Carries a hidden state through a function of a library."""

    def __init__(self, flat: Callable[[Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner, self.hidden, self.flat = nn.Linear(6, 3), torch.zeros(8, 3), flat

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.flat(self.inner(x).tanh() + self.hidden.detach()).view(8, 3)
        return self.hidden


def test_a_library_that_notes_what_it_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hidden state is followed through a library's cache of types, in which a trace leaves none of its own."""
    (tmp_path / "noting.py").write_text(NOTING)
    (tmp_path / "noting-1.0.dist-info").mkdir()  # what a user's own code notes is taken back
    monkeypatch.syspath_prepend(str(tmp_path))
    library = importlib.import_module("noting")
    with pair_of(lambda: Flattening(library.flat), sgd) as pair:
        pair.train(4, {})
        assert [*library.KNOWN] == [Tensor]
        assert "recaptures" not in pair.counters()
    del sys.modules["noting"]


class Recurrent(nn.Module):
    """Carries its hidden state from batch to batch, in a tuple, and an average beside it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.cell, self.head = nn.LSTMCell(6, 5), nn.Linear(5, 3)
        self.hidden: tuple[Tensor, ...] | None = None
        self.mean = torch.zeros(5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = None if self.hidden is None else tuple(part.detach() for part in self.hidden)
        self.hidden = self.cell(x, hidden)
        self.mean = 0.9 * self.mean + 0.1 * self.hidden[0].detach().mean(0)
        return self.head(self.hidden[0] + self.mean)


def test_state_that_is_carried_on_in_attributes() -> None:
    """What stands there is read, whoever put it there: the step before, or the script."""

    def halved(step: PlannedStep) -> None:
        model: Any = step.model
        model.hidden = tuple(0.5 * part for part in model.hidden)
        model.mean.mul_(2.0)

    def begun_anew(step: PlannedStep) -> None:
        step.model.hidden = None

    with pair_of(Recurrent, sgd) as pair:
        pair.train(9, {4: halved, 6: begun_anew})
        assert pair.counters()["eager_steps"] == 1
        assert "recaptures" not in pair.counters()
        with pytest.raises(
            PackageError, match="got 3 tensors that it keeps under other names for the"
        ):
            pair.program.save("unused.pt2", batch_of(0))


class Remembering(nn.Module):
    """Hands tensors on from name to name: the last two results."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.before, self.last = torch.zeros(8, 3), torch.ones(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.inner(x) + 0.3 * self.last - 0.1 * self.before
        self.before = self.last
        self.last = scores.detach()
        return scores


def test_tensors_that_are_handed_on() -> None:
    """Each name holds what stood under the other one before the step, whoever put it there."""

    def given(step: PlannedStep) -> None:
        model: Any = step.model
        model.last = torch.full((8, 3), 2.0)

    with pair_of(Remembering, sgd) as pair:
        pair.train(7, {4: given})
        for mine, theirs in zip(*([m.before, m.last] for m in map(_model, pair)), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert "recaptures" not in pair.counters()


def _model(step: PlannedStep) -> Any:
    return step.model


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
@pytest.mark.parametrize(
    "shape", [nn.utils.weight_norm, nn.utils.spectral_norm, lambda one: prune.l1_unstructured(one, "weight", 0.5)]
)  # fmt: skip
def test_hooks_that_put_a_weight_there_in_each_call(shape: Callable[[nn.Module], Any]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(6, 3)
        shape(layer)
        return nn.Sequential(layer)

    with pair_of(make, sgd) as pair:
        pair.train(4, {})
        mine, theirs = (step.model.get_submodule("0").weight for step in pair)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert "recaptures" not in pair.counters()
