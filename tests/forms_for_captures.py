"""How far the form that an optimizer takes in a graph is from the one that a script runs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ridgeline.optimizers.capturable import make_capturable

SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "SGD": (
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.9, "dampening": 0.3, "maximize": True},
    ),
    "Adam": ({}, {"amsgrad": True}, {"weight_decay": 0.1}, {"betas": (0.5, 0.9), "maximize": True}),
    "AdamW": ({}, {"amsgrad": True}, {"weight_decay": 0.3}),
    "Adamax": ({}, {"weight_decay": 0.1}, {"maximize": True}),
    "Adadelta": ({}, {"rho": 0.5, "weight_decay": 0.1}),
    "Adagrad": ({}, {"lr_decay": 0.1}, {"initial_accumulator_value": 0.1, "weight_decay": 0.1}),
    "ASGD": ({}, {"t0": 3, "lambd": 0.01}, {"alpha": 0.5, "t0": 2}),
    "NAdam": ({}, {"momentum_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ({}, {"weight_decay": 0.1}),
    "RMSprop": ({}, {"centered": True}, {"momentum": 0.9, "weight_decay": 0.1}),
    "Rprop": ({}, {"etas": (0.3, 1.5)}),
}
"""What changes an optimizer's rule."""
CASES = [(name, settings) for name, several in SETTINGS.items() for settings in several]
BEGUN = (0, 5, 40)
"""Steps that were made before: what a rule does at first, and what it comes to."""
NUM_STEPS = 10


def gap(name: str, settings: dict[str, Any], dtype: torch.dtype, device: str) -> float:
    """The largest difference after any of ten steps, beside the update until then."""
    return max(_gap(name, settings, dtype, device, begun) for begun in BEGUN)


def _gap(name: str, settings: dict[str, Any], dtype: torch.dtype, device: str, begun: int) -> float:
    source = torch.Generator().manual_seed(1)

    def step(*sides: tuple[list[nn.Parameter], torch.optim.Optimizer]) -> None:
        gradients = [torch.randn(p.shape, generator=source, dtype=dtype) for p in sides[0][0]]
        for parameters, optimizer in sides:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.to(device, copy=True)
            optimizer.step()

    def side(values: list[Tensor]) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
        parameters = [nn.Parameter(value.clone()) for value in values]
        return parameters, getattr(torch.optim, name)(parameters, lr=1e-2, **settings)

    shapes = ((5, 4), (7,))
    plain = side([torch.randn(s, generator=source, dtype=dtype).to(device) for s in shapes])
    for _ in range(begun):
        step(plain)
    captured = side([p.detach() for p in plain[0]])
    captured[1].load_state_dict(copy.deepcopy(plain[1].state_dict()))
    make_capturable(captured[1], torch.device(device))
    before, largest = _flat(plain[0]), 0.0
    for _ in range(NUM_STEPS):
        step(plain, captured)
        wanted = _flat(plain[0])
        apart = (_flat(captured[0]) - wanted).norm() / (wanted - before).norm()
        largest = max(largest, float(apart))
    return largest


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().double().flatten().cpu() for p in parameters])
