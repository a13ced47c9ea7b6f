"""A model that reads something in every way that Python has, and ways to change what it reads."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

FACTOR = 2.0


@dataclass(slots=True)
class Config:
    """Read at depth, from a slot."""

    gain: float = 1.5


class Plain:
    """No module; its method and its property are called."""

    def __init__(self) -> None:
        self.config = Config()
        self.table = {"shift": [0.5, 0.25]}

    @property
    def shift(self) -> float:
        return self.table["shift"][0]

    def apply(self, x: Tensor) -> Tensor:
        return x * self.config.gain + self.shift


class Part(nn.Module):
    """A submodule of which other things than `forward` are used."""

    power = 1.25

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 2)

    def helper(self, x: Tensor, scale: float = 3.0) -> Tensor:
        return x @ self.weight * scale * self.power

    @property
    def bias(self) -> float:
        return 0.125

    @classmethod
    def of_class(cls, x: Tensor) -> Tensor:
        return x + cls.power

    @staticmethod
    def of_nobody(x: Tensor) -> Tensor:
        return x - 1.0


class Base(nn.Module):
    """Its `forward` is inherited."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.part, self.plain = Part(), Plain()
        self.part.register_forward_hook(made_hook({"k": 2.0}))
        self.act: Any = torch.tanh
        self.zero = 0.0
        self.pairs = ([1.0], [2.0])
        self.functions = [Tensor.sin]
        self.scale = 1.0

    def shape(self, x: Tensor) -> Tensor:
        return x * 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.shape(self.act(self.linear(x))) * FACTOR * self.scale
        h = self.part.of_class(self.part.of_nobody(self.part.helper(h) + self.part.bias))
        h = self.plain.apply(h) * math.copysign(1.0, self.zero) * getattr(self, "late", 1.0)
        h = self.functions[0](h) * self.pairs[0][0]
        try:
            h = h + self.absent
        except AttributeError:
            h = h + 0.5
        return h if x.is_contiguous() else h + 1.0


class Derived(Base):
    """Calls what it inherits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * OFFSETS["o"]


OFFSETS = {"o": 1.0}


def made_hook(cfg: dict[str, float]) -> Callable[..., Any]:
    """A hook that reads its closure and a default."""

    def hook(_: nn.Module, __: Any, out: Any, by: float = 1.0) -> Any:
        return out * cfg["k"] * by

    return hook


def transposed(model: Base) -> None:
    model.linear.weight.data = model.linear.weight.data.t()


def twisted(model: Base) -> None:
    with torch.no_grad():
        model.linear.weight.t_()


def retyped(model: Base) -> None:
    model.linear.bias.data = model.linear.bias.data.view(torch.int32).view(torch.float32) + 0.5


def in_globals(name: str, value: Any) -> Callable[[Base], None]:
    return lambda _: globals().__setitem__(name, value)


def on(owner: Callable[[Base], Any], name: str, value: Any) -> Callable[[Base], None]:
    return lambda model: setattr(owner(model), name, value)


CHANGES: dict[str, Callable[[Base], Any]] = {
    "global": in_globals("FACTOR", 5.0),
    "entry of a global": lambda _: OFFSETS.__setitem__("o", 3.0),
    "attribute": on(lambda m: m, "scale", 4.0),
    "attribute of another type": on(lambda m: m, "scale", True),
    "negative zero": on(lambda m: m, "zero", -0.0),
    "attribute that appears": on(lambda m: m, "late", 7.0),
    "attribute that was missing": on(lambda m: m, "absent", 7.0),
    "list in a tuple": lambda m: m.pairs[0].__setitem__(0, 3.0),
    "method of tensors in a list": lambda m: m.functions.__setitem__(0, Tensor.cos),
    "slot": on(lambda m: m.plain.config, "gain", 9.0),
    "element at depth": lambda m: m.plain.table["shift"].__setitem__(0, 8.0),
    "method of an object": on(lambda m: m.plain, "apply", lambda x: x),
    "method of the module": on(lambda m: m, "shape", lambda x: x * 2.0),
    "forward of the module": on(lambda m: m, "forward", lambda x: x),
    "inherited forward": on(lambda _: Base, "forward", lambda _, x: x),
    "helper of a submodule": on(lambda _: Part, "helper", lambda _, x: x),
    "helper of a derived class": on(lambda _: Derived, "shape", lambda _, x: x * 3.0),
    "default of a helper": on(lambda _: Part.helper, "__defaults__", (6.0,)),
    "code of a helper": on(lambda _: Part.of_nobody, "__code__", (lambda x: x * 2.0).__code__),
    "property": on(lambda _: Part, "bias", property(lambda _: 2.0)),
    "class method": on(lambda _: Part, "of_class", classmethod(lambda _, x: x * 4.0)),
    "static method": on(lambda _: Part, "of_nobody", staticmethod(lambda x: x * 4.0)),
    "variable of a class": on(lambda _: Part, "power", 2.5),
    "variable of a class that hides a parameter": on(lambda _: Part, "weight", torch.ones(4, 4)),
    "variable of a class that hides a submodule": on(lambda _: Base, "linear", nn.Linear(4, 4)),
    "method of a plain class": on(lambda _: Plain, "apply", lambda _, x: x),
    "forward of torch's": on(lambda _: nn.Linear, "forward", lambda s, x: x + s.bias),
    "class of the module": on(lambda m: m, "__class__", Base),
    "function": on(lambda m: m, "act", torch.sigmoid),
    "transposed weight": transposed,
    "transposed in place": twisted,
    "data of a parameter": retyped,
    "parameter": on(lambda m: m.linear, "weight", nn.Parameter(torch.ones(4, 4))),
    "submodule": lambda m: setattr(m, "part", copy.deepcopy(m.part)),
    "hook": lambda m: m.linear.register_forward_hook(lambda _, __, out: out * 2.0),
    "hook before": lambda m: m.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,)),
    "hook of all modules": lambda _: REMOVED.append(
        register_module_forward_hook(lambda _, __, out: out * 2.0)
    ),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "default dtype": lambda _: torch.set_default_dtype(torch.float64),
}
"""Each changes the result, or could."""
REMOVED: list[Any] = []
