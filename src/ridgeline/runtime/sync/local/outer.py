"""The outer optimizer: what workers that train alone have in common, and how their progress changes it.

The common parameters and the outer momentum lie as the buckets do, in single precision at least: a common
parameter in half precision would swallow small changes.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.parameter_memory import ParameterMemory

OWN_SHARE = 0.5
"""Of a worker's own parameters, where it continued while they were exchanged; the rest are the common ones.

Source: the factor alpha of "Streaming DiLoCo" (Douillard et al., 2025), section on overlapping communication.
"""


class OuterOptimizer:
    """SGD with Nesterov momentum on the common parameters, whose gradient is the workers' mean difference.

    With `rate` 1 and `momentum` 0 the common parameters become the mean of the workers' own.

    Args:
        buckets: Of all parameters that are exchanged.
        rate: Learning rate.
        momentum: 0 keeps no momentum.

    Cost: Allocates 4 bytes an element (8 of double precision), and with momentum as much again.

    Source: Douillard et al., "DiLoCo", 2023; the update is that of `torch.optim.SGD(nesterov=True)`.
    """

    def __init__(self, buckets: Sequence[Bucket], *, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self._parameters = [parameter for bucket in buckets for parameter in bucket.parameters]
        self._common = ParameterMemory("common", keeps_kind=True)
        self._common.arranged(buckets)
        self._speed = ParameterMemory("outer_momentum", keeps_kind=True)
        self._speed.arranged(buckets if momentum else ())
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Take this worker's parameters as the common ones, and forget the momentum."""
        for place, parameter in zip(self._common.views.values(), self._parameters, strict=True):
            place.copy_(parameter)
        self._speed.load_state_dict({})

    @torch.no_grad()
    def difference(self, bucket: Bucket, scale: float) -> None:
        """Fill a bucket with how far this worker's parameters are behind the common ones, scaled."""
        common = self._common.of(bucket)
        for position, parameter in enumerate(bucket.parameters):
            torch.sub(bucket.place(position, common), parameter, out=bucket.views[position])
        if scale != 1.0:
            bucket.payload.mul_(scale)

    @torch.no_grad()
    def update(self, bucket: Bucket, *, is_late: bool = False) -> None:
        """Apply the mean difference that the bucket holds, and have the worker continue from the result.

        Args:
            bucket: Holds the difference.
            is_late: The worker has taken steps since, of which it keeps its share; see `OWN_SHARE`.
        """
        common, change = self._common.of(bucket), bucket.payload
        if self._momentum:
            # Momentum sums up many small changes, which half precision would swallow.
            change = change.to(common.dtype)
            speed = self._speed.of(bucket).mul_(self._momentum).add_(change)
            # Not in place: the bucket keeps what arrived, and momentum its own sum.
            change = change.add(speed, alpha=self._momentum)
        common.sub_(change, alpha=self._rate)
        for position, parameter in enumerate(bucket.parameters):
            place = bucket.place(position, common)
            if is_late:
                parameter.lerp_(place.to(parameter.dtype), 1.0 - OWN_SHARE)
            else:
                parameter.copy_(place)

    def common(self) -> Iterable[tuple[str, Tensor]]:
        """The common parameters by name: the same bits on all workers at any time."""
        return self._common.views.items()

    def state_dict(self) -> dict[str, Tensor]:
        """`common.<parameter>` and `outer_momentum.<parameter>` to their tensors, not copied."""
        return self._common.state_dict() | self._speed.state_dict()

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take these instead; what is missing begins as `begin` has it."""
        self.begin()
        for name, place in self.state_dict().items():
            if (saved := state.get(name)) is not None:
                place.copy_(saved)
