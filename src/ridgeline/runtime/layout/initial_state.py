"""Workers that hold the same parameters begin with the same: those of the first of them.

Most scripts seed all workers alike, and trials begin with what an earlier one left: over a slow link what all
have already is not sent once more.
"""

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.runtime.layout.ownership import replicated_axes
from ridgeline.runtime.layout.same_state import is_same_model
from ridgeline.workers import attendance
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World


def take_initial_state(model: nn.Module, world: World) -> None:
    """Parameters and buffers of the first worker along each replicated axis, to all, whatever their strides.

    Args:
        model: Changed in place.
        world: This worker's place.

    Raises:
        WorkloadError: a buffer cannot be sent; see `FlatBuffers`.

    Cost: Reads all of them and compares checksums. Where some differ one broadcast a parameter, and one for
        the buffers, of which there is a copy meanwhile.
    """
    buffers = FlatBuffers(model)
    for axis in replicated_axes(world):
        if is_same_model(model, world, axis):
            continue
        group = world.group(axis)
        with torch.no_grad(), attendance.meeting("the broadcast of the initial parameters", world):
            for parameter in model.parameters():
                carrier = parameter.detach().contiguous()
                # As bytes: gloo takes neither complex numbers nor 16-bit integers or 8-bit floats.
                dist.broadcast(carrier.view(-1).view(torch.uint8), group=group, group_src=0)
                if carrier.data_ptr() != parameter.data_ptr():
                    parameter.copy_(carrier)
        is_first = world.axis_rank(axis) == 0
        if is_first:
            buffers.pack()
        with attendance.meeting("the broadcast of the initial buffers", world):
            for flat in buffers.flats:
                dist.broadcast(flat, group=group, group_src=0)
        if not is_first:
            buffers.unpack()
