"""Frozen parameters that the step itself writes, such as those of a teacher or a target network.

Workers that train alone write each its own. At an exchange they follow worker 0, as buffers do, so that
all continue with the same bits. Those that were not written (a frozen backbone) are not sent.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from ridgeline.runtime.sync.buckets.arrangement import Named
from ridgeline.tensors.copies import num_writes
from ridgeline.workers.agree import gather_bytes
from ridgeline.workers.world import World


class FrozenWrites:
    """Watches frozen parameters.

    Args:
        parameters: (name, parameter) of every parameter.
        world: This worker's place; size at least 2.
    """

    def __init__(self, parameters: Sequence[Named], world: World) -> None:
        self._frozen = [p for _, p in parameters if not p.requires_grad and p.numel()]
        self._world = world
        self.begin()

    def begin(self) -> None:
        """What was written before this does not count."""
        self._versions = num_writes(self._frozen)

    def follow(self) -> None:
        """Take worker 0's values of those that any worker has written since the last call.

        Cost: Where there are frozen parameters, two small all-gathers, for which a GPU is waited for; and a
            broadcast for each type of those that were written, of a copy that is allocated.
        """
        if not self._frozen:
            return
        mine = bytes(map(int.__ne__, num_writes(self._frozen), self._versions))
        everyone = zip(*gather_bytes(mine, self._world, "data"), strict=True)
        pairs = zip(self._frozen, everyone, strict=True)
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in [parameter for parameter, marks in pairs if any(marks)]:
            kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        for members in kinds.values():
            self._take_first(members)
        self.begin()  # that was a write as well, but none of the step's

    def _take_first(self, members: Sequence[nn.Parameter]) -> None:
        with torch.no_grad():
            flat = torch.cat([parameter.flatten() for parameter in members])
            # As bytes: gloo takes neither complex numbers nor 16-bit integers or 8-bit floats.
            dist.broadcast(flat.view(torch.uint8), group=self._world.group("data"), group_src=0)
            parts = flat.split([parameter.numel() for parameter in members])
            for parameter, part in zip(members, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
