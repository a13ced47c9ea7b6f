"""Libraries that remember something of each class of tensors: a trace, whose tensors are of its own, leaves it out."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from step_pairs import pair_of
from torch import Tensor, nn

LIBRARY = """
known = {}


def handler(tensor):
    if known.get(type(tensor)) is None:
        known[type(tensor)] = "torch"
    return known[type(tensor)]


def doubled(tensor):
    return tensor * 2 if handler(tensor) == "torch" else tensor
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Installed, so that what its own variables hold is none of the step's affair."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "kinds_of_tensors.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("kinds_of_tensors")
    del sys.modules["kinds_of_tensors"]


def loss_with(library: ModuleType) -> Any:
    """A loss function that calls it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return library.doubled(model(batch["x"])).square().mean()

    return loss


@pytest.mark.usefixtures("interpreted")
def test_a_cache_by_class_of_tensor(library: ModuleType) -> None:
    """As that of einops: it holds what eager steps put there, and the step is compiled once."""
    with pair_of(loss=lambda: loss_with(library)) as pair:
        pair.train(4, {})
        assert "recaptures" not in pair.counters()
    assert [*library.known] == [torch.Tensor]


@pytest.mark.usefixtures("interpreted")
def test_a_cache_that_grows_is_told_by_what_it_was(library: ModuleType) -> None:
    """The note says what held when the step was compiled, as notes on everything else do."""
    with pair_of(loss=lambda: loss_with(library)) as pair:
        pair.train(5, {3: lambda step: library.known.update({int: "number"})})
        told = "compiled again because len(kinds_of_tensors.known) == 1 no longer holds"
        assert told in pair.program.notes
