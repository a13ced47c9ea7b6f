"""Models of which some workers have no part: a scalar alone, and a parameter without elements."""

from typing import Any

import torch
from torch import nn

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.workers.world import World


def of_one_scalar(world: World, plan: Plan) -> float:
    """The only parameter of a model, of which the second worker has no part, clipped."""
    model = nn.ParameterList([nn.Parameter(torch.tensor(2.0))])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with PlannedStep(
        model,
        lambda model, batch: model[0] * batch,  # type: ignore[index]
        optimizer,
        plan,
        device="cpu",
        clip_norm=0.5,
    ) as step:
        for _ in range(2):
            step(torch.tensor(3.0 + world.rank))
    return model[0].tolist()


def without_elements(world: World, plan: Plan) -> dict[str, Any]:
    """The optimizer's whole state, of a parameter without elements beside one that has some."""
    model = nn.ParameterDict({"full": torch.ones(5), "empty": torch.ones(0, 3)})
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    with PlannedStep(
        model,
        lambda model, batch: (model["full"] * batch).sum() + model["empty"].sum(),  # type: ignore[index]
        optimizer,
        plan,
        device="cpu",
    ) as step:
        for _ in range(3):
            step(torch.arange(5.0) + world.rank)
        return step.optimizer_state()
