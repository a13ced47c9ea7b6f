"""Libraries that remember something of each class of tensors: a trace, whose tensors are of its own, leaves it out."""

import importlib
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
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Installed, so that what its own variables hold is none of the step's affair."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "kinds_of_tensors.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("kinds_of_tensors")


@pytest.mark.usefixtures("interpreted")
def test_a_cache_by_class_of_tensor(library: ModuleType) -> None:
    """As that of einops: it holds what eager steps put there, and the step is compiled once."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return library.doubled(model(batch["x"])).square().mean()

    with pair_of(loss=lambda: loss) as pair:
        pair.train(4, {})
        assert "recaptures" not in pair.counters()
    assert [*library.known] == [torch.Tensor]
