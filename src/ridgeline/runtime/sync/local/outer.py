"""The outer optimizer: what workers that train alone have in common, and how their progress changes it.

The common parameters and the outer momentum lie as the buckets do, in single precision at least: a common
parameter in half precision would swallow small changes.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket

OWN_SHARE = 0.5
"""Of a worker's own parameters, where it continued while they were exchanged; the rest are the common ones.

Source: the factor alpha of "Streaming DiLoCo" (Douillard et al., 2025), section on overlapping communication.
"""
COMMON = "common."
MOMENTUM = "outer_momentum."


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
        self._common = [_beside(bucket) for bucket in buckets]
        self._speed = [_beside(bucket) for bucket in buckets] if momentum else []
        self._members = list(_members(buckets, self._common))
        self._speeds = [(name, place) for name, _, place in _members(buckets, self._speed)]
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Take this worker's parameters as the common ones, and forget the momentum."""
        for _, parameter, place in self._members:
            place.copy_(parameter)
        for flat in self._speed:
            flat.zero_()

    @torch.no_grad()
    def difference(self, bucket: Bucket, scale: float) -> None:
        """Fill a bucket with how far this worker's parameters are behind the common ones, scaled."""
        common = self._common[bucket.index]
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
        common, change = self._common[bucket.index], bucket.payload
        if self._momentum:
            # Momentum sums up many small changes, which half precision would swallow.
            change = change.to(common.dtype)
            speed = self._speed[bucket.index].mul_(self._momentum).add_(change)
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
        return ((name, place) for name, _, place in self._members)

    def state_dict(self) -> dict[str, Tensor]:
        """`common.<parameter>` and `outer_momentum.<parameter>` to their tensors, not copied."""
        common = {f"{COMMON}{name}": place for name, place in self.common()}
        return common | {f"{MOMENTUM}{name}": place for name, place in self._speeds}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take these instead; what is missing begins as `begin` has it."""
        self.begin()
        for name, place in self.state_dict().items():
            if (saved := state.get(name)) is not None:
                place.copy_(saved)


def _beside(bucket: Bucket) -> Tensor:
    dtype = torch.promote_types(bucket.payload.dtype, torch.float32)
    return torch.zeros_like(bucket.payload, dtype=dtype)


def _members(
    buckets: Sequence[Bucket], flats: Sequence[Tensor]
) -> Iterable[tuple[str, Tensor, Tensor]]:
    """(name, parameter, its place in the flat tensor of its bucket)."""
    for bucket, flat in zip(buckets, flats, strict=False):
        for position, parameter in enumerate(bucket.parameters):
            yield bucket.names[position], parameter, bucket.place(position, flat)
