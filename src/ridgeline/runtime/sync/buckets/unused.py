"""Parameters for which this worker has no gradient: used by others, or not at all."""

from collections.abc import Sequence

import torch

from ridgeline.errors import PlanError
from ridgeline.runtime.sync.buckets.buckets import Bucket


class UnusedParameters:
    """Knows, as far as steps have shown it, which parameters no worker used.

    Args:
        on_device: Steps may be captured.
    """

    def __init__(self, *, on_device: bool) -> None:
        self._on_device = on_device
        self._is_unused: dict[str, bool] = {}

    def settle(self, bucket: Bucket, positions: Sequence[int]) -> None:
        """Give parameters that only other workers used their mean; leave None what no worker used.

        Args:
            bucket: Its exchange is over.
            positions: Of the parameters in it for which this worker had no gradient.

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
