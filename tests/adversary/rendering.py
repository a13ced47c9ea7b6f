"""A program as the text of a Python file: definitions, `make()`, and one function for each call."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from string import Template

from adversary.devices import moved
from adversary.grammar import catalogue
from adversary.grammar.feature import Feature
from adversary.program import Call, Program, Use

OWNERS = {
    "net": "w.model",
    "block": "w.model.blocks[0]",
    "loss": "w.loss_fn",
    "optimizer": "w.optimizer",
}
CLASSES = {"net": "Net", "block": "Block", "loss": "", "optimizer": ""}

HEAD = """import contextlib
import copy
import dataclasses
import functools
import math
import random
import types
import typing

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def global_hook(hook):
    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Named(typing.NamedTuple):
    x: typing.Any
    by: typing.Any


@dataclasses.dataclass
class Held:
    x: typing.Any
    by: typing.Any


class Labelled(torch.Tensor):
    pass


def tensor_of(given):
    if isinstance(given, dict):
        return given["x"] * given["by"]
    return given if torch.is_tensor(given) else given.x * given.by


class Doubling(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function is torch.tanh else result


class Halving(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 0.5 if function is torch.ops.aten.tanh.default else result
"""

MAKE = '''
def make():
    """A model, its loss and its optimizer, always from the same start."""
    torch.manual_seed(1)
    model = Net()
    loss_fn = make_loss(model)
    return types.SimpleNamespace(model=model, loss_fn=loss_fn, optimizer=make_optimizer(model))


def x_of(index):
    """The input of a call."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(index), dtype=torch.float32)
'''


def render(program: Program, device: str = "cpu") -> str:
    """The program as a Python file, which computes on a device; it imports torch and numpy only."""
    uses = [(use, catalogue.FEATURES[use.feature]) for use in program.uses]
    parts = [
        f'"""Program {program.seed}: {", ".join(program.words()) or "nothing but layers"}."""\n',
        HEAD,
        *(_fill(feature.top, use) for use, feature in uses if feature.top),
        _class("Block", [pair for pair in uses if pair[0].site == "block"]),
        _class("Net", [pair for pair in uses if pair[0].site == "net"]),
        _loss([pair for pair in uses if pair[0].site == "loss"]),
        _optimizer(program, uses),
        MAKE,
        *(_call(program, index, call, uses) for index, call in enumerate(program.calls)),
        _calls(program),
    ]
    text = "\n".join(part.strip("\n") + "\n" for part in parts if part.strip())
    return moved(text, device)


def _fill(text: str, use: Use) -> str:
    return Template(text.strip("\n")).substitute(
        n=use.number, owner=OWNERS[use.site], cls=CLASSES[use.site]
    )


def _lines(uses: Iterable[tuple[Use, Feature]], fragment: str, spaces: int) -> str:
    filled = [_fill(getattr(feature, fragment), use) for use, feature in uses]
    return textwrap.indent("\n".join(text for text in filled if text), " " * spaces)


def _class(name: str, uses: list[tuple[Use, Feature]]) -> str:
    bases = [_fill(feature.bases, use) for use, feature in uses if feature.bases]
    results = [_fill(feature.result, use) for use, feature in uses if feature.result]
    is_net = name == "Net"
    layers = (
        ["self.blocks = nn.ModuleList([Block(), Block()])", "self.head = nn.Linear(4, 4)"]
        if is_net
        else ["self.lin = nn.Linear(4, 4)"]
    )
    start = (
        [
            "x = tensor_of(x)",
            "y = x.to(self.head.weight.dtype)",
            "for block in self.blocks:",
            "    y = block(y)",
        ]
        if is_net
        else ["y = torch.tanh(self.lin(y))"]
    )
    end = ["y = self.head(y)"] if is_net else []
    lines = [
        f"class {name}({', '.join([*bases, 'nn.Module'])}):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in layers),
        _lines(uses, "init", 8),
        "",
        f"    def forward(self, {'x' if is_net else 'y'}):",
        *(f"        {line}" for line in start),
        _lines(uses, "forward", 8),
        *(f"        {line}" for line in end),
        f"        return {results[-1] if results else 'y'}",
        "",
        _lines(uses, "methods", 4),
    ]
    return "\n" + "\n".join(line for line in lines if line is not None)


def _loss(uses: list[tuple[Use, Feature]]) -> str:
    lines = [
        "def make_loss(model):",
        _lines(uses, "init", 4),
        "    def loss_fn(model, x):",
        "        y = model(x)",
        "        loss = (y - 0.5).square().mean()",
        _lines(uses, "forward", 8),
        "        return loss",
        "",
        "    return loss_fn",
    ]
    return "\n" + "\n".join(line for line in lines if line)


def _optimizer(program: Program, uses: list[tuple[Use, Feature]]) -> str:
    more = [_fill(feature.params, use) for use, feature in uses if feature.params]
    groups = "".join(f", *{text}" for text in more)
    made = catalogue.OPTIMIZERS[program.optimizer]
    return f"\ndef make_optimizer(model):\n    params = [*model.parameters(){groups}]\n    return {made}\n"


def _call(program: Program, index: int, call: Call, uses: list[tuple[Use, Feature]]) -> str:
    lines = [f"def call_{index}(w, run):"]
    each = _lines(uses, "each", 4)
    lines += [each] if each else []
    if call.change is not None:
        lines.append(textwrap.indent(_change(program, call), "    "))
    lines.append(f"    x = {catalogue.INPUTS[call.input]}".replace("$i", str(index)))
    context = catalogue.CONTEXTS[call.context]
    if context:
        lines += [f"    with {context}:", "        return run(x)"]
    else:
        lines.append("    return run(x)")
    return "\n" + "\n".join(lines)


def _change(program: Program, call: Call) -> str:
    assert call.change is not None
    name = call.change.name
    if call.change.number is None:
        return catalogue.CHANGES[name].strip("\n")
    use = next(use for use in program.uses if use.number == call.change.number)
    return _fill(catalogue.FEATURES[use.feature].changes[name], use)


def _calls(program: Program) -> str:
    names = ", ".join(f"call_{index}" for index in range(len(program.calls)))
    return f"\nCALLS = [{names}]\n"
