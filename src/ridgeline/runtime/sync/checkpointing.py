"""What each worker's synchronizer remembers, to checkpoints and back: every worker has its own."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.runtime import attendance
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.runtime.world import World

PREFIX = "sync."


def gathered(synchronizer: Synchronizer | None, world: World) -> dict[str, Tensor]:
    """The state of all workers, on the CPU of the first one; nothing on the others.

    Args:
        synchronizer: This worker's; all workers remember tensors of the same names and shapes.
        world: This worker's place.

    Returns:
        `sync.<rank>.<name>` to tensors of their own memory.

    Cost: Where there is state, one gathering for each tensor of it, and on the first worker the memory of
        all workers' states on the host.
    """
    found: dict[str, Tensor] = {}
    if synchronizer is None:
        return found
    for name, tensor in synchronizer.state_dict().items():
        carrier = tensor.detach().contiguous()
        is_first = world.rank == 0
        parts = [torch.empty_like(carrier) for _ in range(world.size)] if is_first else None
        with attendance.meeting(f"the gathering of {name}", world):
            dist.gather(carrier, parts, group=world.group(), group_dst=0)
        for rank, part in enumerate(parts or ()):
            found[f"{PREFIX}{rank}.{name}"] = part.cpu()
    return found


def of_worker(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """What one worker remembers, of what was gathered."""
    own = f"{PREFIX}{rank}."
    return {n.removeprefix(own): tensor for n, tensor in tensors.items() if n.startswith(own)}
