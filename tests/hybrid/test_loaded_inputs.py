"""Saved programs refuse what they would pass by: tangents, transforms, tensors with functions of their own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.hybridize import hybridize
from ridgeline.errors import BatchError
from ridgeline.plan import Plan
from ridgeline.runtime.steps.load import load
from ridgeline.runtime.steps.step import PlannedStep

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
X = torch.linspace(-1.0, 1.0, 12).view(3, 4)


class Named(Tensor):
    """A subclass."""


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.fixture(scope="module", params=["callable", "step"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    from torch._inductor import config

    path: Path = tmp_path_factory.mktemp("saved") / "program.pt2"
    with config.patch(compile_threads=1):
        model = nn.Linear(4, 2)
        if request.param == "callable":
            with hybridize(model, X, "packaged") as hybrid:
                hybrid.save(path)
        else:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with PlannedStep(model, squares, optimizer, Plan(), device="cpu") as step:
                step(X)
                step.save(path, X)
    return load(path, device="cpu")


def tangent(fn: Callable[[Tensor], Any]) -> None:
    with torch.autograd.forward_ad.dual_level():
        fn(torch.autograd.forward_ad.make_dual(X, X))


WAYS: dict[str, Callable[[Callable[[Tensor], Any]], Any]] = {
    "tangent": tangent,
    "functionalize": lambda fn: torch.func.functionalize(fn)(X),
    "vmap": lambda fn: torch.vmap(fn)(torch.stack([X, X])),
}


@pytest.mark.parametrize("way", WAYS)
def test_transforms(loaded: Callable[..., Any], way: str) -> None:
    """The call is refused; outside it is served."""
    with torch.no_grad():
        with pytest.raises(BatchError, match="got one inside of forward-mode differentiation"):
            WAYS[way](loaded)
        loaded(X)


def test_subclasses(loaded: Callable[..., Any]) -> None:
    """They are named, with the way out."""
    with torch.no_grad(), pytest.raises(BatchError, match=r"got leaf 0, a Named, .* \.as_subclass"):
        loaded(X.as_subclass(Named))
