"""Flags of gradients: exchanged where no transport carries them, and read where a worker has one less."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.buckets.buckets import Bucket


class SharedFlags:
    """What lies behind the payloads of some buckets, summed over the workers in one small collective a step.

    Args:
        buckets: All of one device.
        group: Of the workers.
    """

    def __init__(self, buckets: Sequence[Bucket], group: dist.ProcessGroup) -> None:
        # Flags behind complex gradients are complex, too; torch warns where such numbers become real ones.
        self._behind = [real_of(bucket.behind) for bucket in buckets]
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


def real_of(signals: Tensor) -> Tensor:
    """A view of the numbers in signals, which are complex where the parameters of their bucket are."""
    return signals.real if signals.is_complex() else signals


class UnusedParameters:
    """Knows, as far as steps have shown it, which parameters no worker used.

    Args:
        on_device: Steps may be captured.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._is_unused: dict[str, bool] = {}

    def settle(self, bucket: Bucket, positions: Sequence[int]) -> list[int]:
        """Give parameters that only other workers used their mean; leave None what no worker used.

        Args:
            bucket: Its exchange is over.
            positions: Of the parameters in it for which this worker had no gradient.

        Returns:
            The positions of those that no worker used.

        Raises:
            PlanError: the step is being captured, and an eager step before had that gradient.

        Cost: Reads the bucket's flags, which waits for the device. Inside a capture that is
            impossible: there the answer of the last eager step holds, as everything else captured does.
        """
        capturing = self._on_device and torch.cuda.is_current_stream_capturing()
        flags = None if capturing else bucket.flags.tolist()
        for position in positions:
            name = bucket.names[position]
            if flags is not None:
                self._is_unused[name] = flags[position] == 0
            elif name not in self._is_unused:
                raise PlanError(
                    f"wanted a gradient for {name} in the captured step, as in the eager steps before, got "
                    "none; the step uses different parameters from call to call, use execution='eager'"
                )
            if self._is_unused[name]:
                bucket.parameters[position].grad = None
            else:
                bucket.show(position)
        return [position for position in positions if self._is_unused[bucket.names[position]]]
