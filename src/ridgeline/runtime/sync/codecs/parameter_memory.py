"""What is remembered of each parameter from step to step, laid out as the buckets are.

Kept in single precision and keyed by parameter, so that it survives new buckets and checkpoints.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket


class ParameterMemory:
    """One float32 number for each element of the gradients in some buckets; zero at first.

    Args:
        prefix: Head of the names of its state, `prefix.<parameter>`.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._flats: dict[int, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Keep what is known of each parameter for these buckets.

        Cost: Allocates 4 bytes an element.
        """
        # Views keep the old memory alive until what is in it has been copied to the new places.
        known = dict(self._views)
        self._views.clear()
        self._flats.clear()
        for bucket in buckets:
            flat = torch.zeros_like(bucket.payload, dtype=torch.float32)
            for position, name in enumerate(bucket.names):
                place = bucket.place(position, flat)
                if name in known:
                    place.copy_(known[name])
                self._views[name] = place
            self._flats[bucket.index] = flat

    def of(self, bucket: Bucket) -> Tensor:
        """What is remembered of a bucket: float32, as its payload lies."""
        return self._flats[bucket.index]

    def state_dict(self) -> dict[str, Tensor]:
        """`prefix.<parameter>` to its tensor, not copied."""
        return {f"{self._prefix}.{name}": view for name, view in self._views.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead; parameters that are missing begin at zero."""
        for name, view in self._views.items():
            if (saved := state.get(f"{self._prefix}.{name}")) is None:
                view.zero_()
            else:
                view.copy_(saved)
