"""Programs that look for an attribute which is missing, and what their guards say once it is there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ridgeline.guards.guards import Guards


def looking(net: nn.Module, x: Tensor) -> Tensor:
    try:
        return net(x) * net.scale
    except AttributeError:
        return net(x)


Change = Callable[[nn.Sequential], object]
CHANGES: dict[str, tuple[str, Change, Change]] = {
    "attribute": (
        "L['net']",
        lambda net: setattr(net, "scale", 2.0),
        lambda net: delattr(net, "scale"),
    ),
    "buffer": (
        "L['net']",
        lambda net: net.register_buffer("scale", torch.ones(1)),
        lambda net: delattr(net, "scale"),
    ),
    "of a module inside": (
        "L['net']._modules['1']",
        lambda net: setattr(net[1], "scale", 2.0),
        lambda net: delattr(net[1], "scale"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_program_that_looks_for_an_attribute_names_who_got_one(name: str) -> None:
    """And it holds again once that is gone."""
    where, change, undo = CHANGES[name]
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    arguments: dict[str, Any] = {"net": net, "x": torch.ones(4, 3)}
    guards = Guards(looking, arguments, ["x"])
    assert guards.holds(arguments)
    change(net)
    assert not guards.holds(arguments)
    assert guards.difference(arguments) == f"the attributes of {where} changed"
    undo(net)
    assert guards.holds(arguments)
