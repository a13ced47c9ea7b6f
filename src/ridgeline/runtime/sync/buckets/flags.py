"""The flags of all buckets, in one small collective a step, where no transport carries them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from ridgeline.runtime.sync.buckets.buckets import Bucket


class SharedFlags:
    """What lies behind the payloads of some buckets, summed over the workers.

    Args:
        buckets: All of one device.
        group: Of the workers.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        self._behind = [bucket.behind for bucket in buckets]
        self._group = group
        # Whatever the gradients are of, sums of ones and zeros are exact.
        self._all = torch.cat(self._behind).float()
        self._parts = self._all.split([len(part) for part in self._behind])

    def exchange(self, *, waits: bool) -> "Future[Any] | None":
        """Start the sum; on a GPU it is enqueued.

        Args:
            waits: Whether to return a future of a CPU's exchange.
        """
        torch._foreach_copy_(list(self._parts), self._behind)
        work = dist.all_reduce(self._all, group=self._group, async_op=waits)
        return work.get_future() if work else None

    def settle(self) -> None:
        """Put the sums where the buckets show them."""
        torch._foreach_copy_(self._behind, list(self._parts))
