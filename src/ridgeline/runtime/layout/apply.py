"""A layout applied to a model: each worker gets what it is to hold of it, axis by axis.

What is split is split first, and what is replicated of the parts is made alike last. A new kind of
parallelism is one function in `_ALONG`.
"""

from collections.abc import Callable
from typing import NoReturn

from torch import nn

from ridgeline.errors import PlanError
from ridgeline.plan import Layout
from ridgeline.runtime.layout.initial_state import check_same_model, take_initial_state
from ridgeline.workers.mesh import Axis
from ridgeline.workers.world import World

_ORDER: tuple[Axis, ...] = ("pipeline", "tensor", "shard", "data")


def apply_layout(model: nn.Module, layout: Layout | None, world: World) -> None:
    """Have every worker of the world hold what the layout says, of one model that all have built.

    Args:
        model: Changed in place, on the worker's device.
        layout: Workers along each axis; None: all along the data axis.
        world: This worker's place; its mesh has the axes.

    Raises:
        PlanError: the layout has several workers along another axis than data.
        WorkloadError: the workers built different models, or a buffer cannot be sent.

    Cost: Along the data axis three small exchanges, and a broadcast of the model where workers differ.
    """
    layout = layout or Layout(data=world.size)
    for axis in _ORDER:
        if getattr(layout, axis) > 1:
            _ALONG.get(axis, _refuse)(model, layout, world)


def _replicate(model: nn.Module, _: Layout, world: World) -> None:
    """Data parallelism: every worker holds all that the first one has."""
    check_same_model(model, world)
    take_initial_state(model, world)


def _refuse(_: nn.Module, layout: Layout, __: World) -> NoReturn:
    raise PlanError(
        f"wanted all workers along the data axis, got {layout} in the plan; this release runs "
        "data parallelism only"
    )


_ALONG: dict[Axis, Callable[[nn.Module, Layout, World], None]] = {"data": _replicate}
