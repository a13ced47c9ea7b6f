"""What `rl.hybridize` cannot take is refused by a message of ours, and `auto` goes on without it."""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls import entry
from ridgeline.callables.calls.equivalence import largest_difference
from ridgeline.callables.calls.forms import CallableForm
from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import CaptureError, SideEffectError


def test_parametrized_models_fall_back_to_a_trace() -> None:
    """TorchScript refuses parametrizations only as they run: traced then, and refused by name if not."""
    model, x = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), torch.randn(2, 4)
    with hybridize(model, x, budget_s=15.0) as hybrid:
        torch.testing.assert_close(hybrid(x), model(x).detach())
        row = hybrid.report.row("script")
        assert row is not None
        assert row.reason.startswith(
            "script: traced, since TorchScript cannot read the source (Error: "
        )


def test_a_mode_that_fails_in_its_first_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch raises there is an error of ours that names the mode."""

    def fails(*_: Any) -> Any:
        raise torch.jit.Error("no such thing")

    monkeypatch.setattr(entry, "make_form", lambda *_: CallableForm(fails))
    with pytest.raises(
        CaptureError, match="wanted Linear to run in mode 'script', got Error: no such"
    ):
        hybridize(nn.Linear(4, 4), torch.randn(2, 4), "script")
    with hybridize(nn.Linear(4, 4), torch.randn(2, 4), budget_s=15.0) as hybrid:
        row = hybrid.report.row("script")
        assert row is not None
        assert row.status == "refused"


@dataclasses.dataclass
class Output:
    logits: Tensor


def test_results_that_cannot_be_compared_are_refused() -> None:
    """A dataclass would keep the tensors of the capture: refused by name, and eager in `auto`."""
    layer = nn.Linear(4, 4)
    fn = lambda x: Output(layer(x))  # noqa: E731 - what it returns is the subject
    x = torch.randn(2, 4)
    for mode in ("script", "compiled", "packaged"):
        with pytest.raises(CaptureError, match="got a Output among them"):
            hybridize(fn, x, mode)
    with hybridize(fn, x) as hybrid:
        assert hybrid.mode == "eager"
        torch.testing.assert_close(hybrid(x).logits, layer(x).detach())
    both = Output(x)
    assert largest_difference(both, both)[0] == float("inf")


class CachedBySize(nn.Module):
    """Keeps what it adds, by the size of the batch; TorchScript cannot read its source."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), {}

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[0]
        if size not in self.cache:
            self.cache[size] = torch.linspace(0, 1, 4)
        return self.layer(x) + self.cache[size]


class AskingTwice(CachedBySize):
    """Looks for the entry by another tensor than it made it by, in a trace."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] not in self.cache:
            self.cache[x.shape[0]] = torch.linspace(0, 1, 4)
        return self.layer(x) + self.cache[x.shape[0]]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            CachedBySize,
            r"got a trace that writes where calls do not \(the length of a dict\): sizes",
        ),
        (AskingTwice, r"got KeyError: tensor\(2\); use another mode"),
    ],
)
def test_a_trace_that_fills_a_cache_anew_is_taken_back_and_refused(
    kind: type[CachedBySize], words: str
) -> None:
    """A size is a tensor in a trace of TorchScript, so that the entry of that size is not found."""
    model, x = kind(), torch.randn(2, 4)
    wanted, kept = model(x), model.cache[2]
    with pytest.raises(CaptureError, match=words):
        hybridize(model, x, "script")
    assert [*model.cache.items()] == [(2, kept)]
    with hybridize(model, x, budget_s=15.0) as hybrid:
        torch.testing.assert_close(hybrid(x), wanted.detach())
        model.cache[2].mul_(2)
        torch.testing.assert_close(hybrid(x), model(x).detach())
    assert [*model.cache.items()] == [(2, kept)]


def test_a_model_without_shapes_is_refused() -> None:
    """Lazy parameters have no data to watch: the message says what to do."""
    with pytest.raises(
        CaptureError, match=r"got 'weight' of a LazyLinear that has none yet; call the"
    ):
        hybridize(nn.LazyLinear(3), torch.randn(2, 4))


def test_a_result_that_is_a_parameter_is_refused() -> None:
    """Eager gives the parameter itself, which a program could only give as another tensor."""
    layer = nn.Linear(2, 2)
    with pytest.raises(CaptureError, match=r"a tensor of shape \(2, 2\) that the callable holds"):
        hybridize(lambda x: (layer(x), layer.weight), torch.ones(1, 2), "compiled")


@pytest.mark.parametrize("mode", ["auto", "compiled"])
def test_what_cannot_be_taken_back_is_not_called(mode: Any, tmp_path: Path) -> None:
    """A log has a line for each call of the user's, and an iterator goes on with them; `auto` says why."""
    path, numbers = tmp_path / "log", itertools.count(0.0)

    def logged(x: Tensor) -> Tensor:
        with path.open("a") as log:
            log.write("x")
        return x.sin()

    def drawn(x: Tensor) -> Tensor:
        return x.sin() * next(numbers)

    for fn, what in ((logged, "got open of '"), (drawn, r"got numbers \(a count\)")):
        if mode == "compiled":
            with pytest.raises(SideEffectError, match=what):
                hybridize(fn, torch.ones(3), mode)
            continue
        with hybridize(fn, torch.ones(3), mode) as hybrid:
            assert re.search(what, hybrid.report.reason)
            assert hybrid.report.chosen == "eager"
            assert torch.equal(hybrid(torch.ones(3)), torch.ones(3).sin() * (fn is logged))
    assert next(numbers) == float(mode == "auto")
    assert path.exists() == (mode == "auto")
    assert mode != "auto" or path.read_text() == "x"
