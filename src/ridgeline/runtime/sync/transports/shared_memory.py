"""Memory that the GPUs of one host share: allocated by each, read and written by all.

NVLink multicast is left off: it needs a service of the host that many lack, and fails only when it is used.

Source: torch.distributed._symmetric_memory.
"""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ridgeline.errors import PlanError
from ridgeline.synchronisation import DEFAULT_ALGORITHM

INSTEAD = f"use sync.algorithm={DEFAULT_ALGORITHM!r}"
"""What a refusal ends with."""


class SharedMemory(NamedTuple):
    """A worker's own part, and what reaches those of the others (torch's handle of it)."""

    own: Tensor
    handle: Any

    def of(self, rank: int, like: Tensor) -> Tensor:
        """The memory of another worker from its begin on, as long as `like` and of its dtype."""
        found: Tensor = self.handle.get_buffer(rank, (like.numel(),), like.dtype)
        return found


def share(
    num_elements: int, dtype: torch.dtype, *, group: dist.ProcessGroup, whose: str
) -> SharedMemory:
    """Memory of zeros for so many elements on every GPU; all workers call this together.

    Args:
        num_elements: Of each worker.
        dtype: Of the elements.
        group: The workers.
        whose: What of a plan needs it, for the message.

    Raises:
        PlanError: these GPUs share no memory.
    """
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    from torch.distributed import _symmetric_memory

    memory: Any = _symmetric_memory
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        own: Tensor = memory.empty(num_elements, dtype=dtype, device=device)
        handle = memory.rendezvous(own, group)
    except RuntimeError as error:
        raise PlanError(
            f"wanted GPUs that share memory for {whose}, got "
            f"{str(error).splitlines()[0]!r} ({device}); {INSTEAD}"
        ) from error
    return SharedMemory(own.zero_(), handle)


def check_one_host(hosts: Sequence[Sequence[int]], whose: str) -> None:
    """See that the workers share a host.

    Raises:
        PlanError: they do not.
    """
    if len(hosts) > 1:
        raise PlanError(
            f"wanted workers on one host for {whose}, got {len(hosts)} hosts; {INSTEAD}, or 'hierarchical'"
        )
