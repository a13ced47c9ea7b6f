"""What the code of an optimizer that torch has not written reads: constants of a program, and watched."""

import types
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch
from step_pairs import pair_of
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from ridgeline.runtime.steps.whole_step.optimizer_reads import OptimizerReads

SCALE = 1.0


def _factor(scale: float) -> float:
    return scale * SCALE


class Scaled(SGD):
    """Multiplies gradients by what it finds in attributes, in its class and in a module."""

    damping: ClassVar[float] = 1.0

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.scale = 1.0
        self.settings = types.SimpleNamespace(by_name={"depth": [1.0]})
        self.array = numpy.ones(2)
        self.inner = SGD(self.param_groups[0]["params"], 0.1)
        self.unread = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        factor = _factor(self.scale) * self.damping * float(self.array[0])
        factor *= self.settings.by_name["depth"][0] * self.inner.param_groups[0]["lr"] * 10
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(factor * getattr(parameter, "rate", 1.0))
        super().step()


def _set_global(_: Scaled) -> None:
    globals()["SCALE"] = 0.5


def _set(name: str, value: Any, owner: Callable[[Scaled], Any] = lambda o: o) -> Any:
    return lambda optimizer: setattr(owner(optimizer), name, value)


CHANGES: dict[str, Callable[[Scaled], Any]] = {
    "the optimizer's scale": _set("scale", 0.5),
    "the optimizer's damping": _set("damping", 0.5),
    "the optimizer's settings": lambda o: o.settings.by_name["depth"].__setitem__(0, 0.5),
    "the optimizer's array": lambda o: o.array.fill(0.5),
    "the optimizer's inner": lambda o: o.inner.param_groups[0].update(lr=0.05),
    "rate of a parameter": _set("rate", 0.5, lambda o: o.param_groups[0]["params"][0]),
    "SCALE, which the optimizer's code names,": _set_global,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_of_what_is_read_is_named(
    change: Callable[[Scaled], Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any depth; groups, state and what no code names are compared elsewhere, or not at all."""
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    parameter: Any = nn.Parameter(torch.ones(2))
    parameter.rate = 1.0
    optimizer = Scaled([parameter])
    reads = OptimizerReads(optimizer)
    optimizer.unread = 1
    optimizer.param_groups[0]["lr"] = 0.1
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert reads.changed() is None
    change(optimizer)
    assert reads.changed() == f"{request.node.callspec.id} changed"


def test_a_variable_of_the_class_is_read_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the object that hides it is the case above."""
    reads = OptimizerReads(Scaled([nn.Parameter(torch.ones(2))]))
    monkeypatch.setattr(Scaled, "damping", 0.5)
    assert reads.changed() == "the optimizer's damping changed"


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_torchs_own_read_nothing_else(kind: type[Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2))], 0.1)
    reads = OptimizerReads(optimizer)
    vars(optimizer)["anything"] = 1
    assert reads.changed() is None


@pytest.mark.usefixtures("interpreted")
def test_one_program_follows_what_an_optimizer_reads() -> None:
    """By compiling again, once for each change."""
    with pair_of(optimizer=lambda model: Scaled(model.parameters())) as pair:
        changes = {
            3: CHANGES["the optimizer's scale"],
            6: CHANGES["the optimizer's settings"],
        }
        pair.train(9, {at: lambda step, do=do: do(step.optimizer) for at, do in changes.items()})
        assert pair.counters()["recaptures"] == 2
