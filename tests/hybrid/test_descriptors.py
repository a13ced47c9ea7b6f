"""Attributes behind which code of a class runs: reading a program runs none of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.callables.calls.reads import CallReads
from ridgeline.guards.settled import WritingError
from ridgeline.guards.writes import is_computed


class Lazily:
    """A method that is called once, as `functools.cached_property` has it from Python 3.12 on: with no lock."""

    def __init__(self, method: Any) -> None:
        self._method, self._name = method, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if self._name not in instance.__dict__:
            instance.__dict__[self._name] = self._method(instance)
        return instance.__dict__[self._name]


class Scaled(nn.Module):
    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.root, self._calls = nn.Linear(4, 4), 2.0, 0.0

    @Lazily
    def twice(self) -> float:
        return 2.0 * self.root

    @property
    def calls(self) -> float:
        return self._calls

    @calls.setter
    def calls(self, value: float) -> None:
        self._calls = value + 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.twice


class Counting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls
        return self.layer(x) * self.calls


def test_what_is_computed_once_is_not_computed_by_reading() -> None:
    """Else it would stay as it was then, whatever changes before the first call."""
    model = Scaled()
    with pytest.raises(WritingError, match=r"writes Scaled\.twice \(a Scaled\)"):
        CallReads(model, (torch.randn(3, 4),))
    assert "twice" not in vars(model)


def test_an_assignment_to_a_setter_is_a_write() -> None:
    """Also of what is there already: the setter may make something else of it."""
    model = Counting()
    with pytest.raises(WritingError, match="calls"):
        CallReads(model, (torch.randn(3, 4),))
    assert model.calls == 0.0


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        *(("twice", True), ("calls", True), ("training", True)),
        *(("slot", False), ("forward", False), ("absent", False)),
    ],
)
def test_computed_attributes(name: str, wanted: bool) -> None:
    """Of a class, whatever its objects hold: methods and slots only keep what is assigned."""

    class Trained(Scaled):
        training = property(lambda self: True)  # a name that others assign in `vars`

    assert is_computed(SimpleNamespace(value=Trained.__new__(Trained)), name) is wanted
