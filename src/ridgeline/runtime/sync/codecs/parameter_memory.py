"""What is remembered of each parameter from step to step, laid out as the buckets are.

Kept in single precision and keyed by parameter, so that it survives new buckets and checkpoints.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket


class ParameterMemory:
    """One number for each element of the gradients in some buckets; zero at first.

    Args:
        prefix: Head of the names of its state, `prefix.<parameter>`.
        keeps_kind: They are complex, or of double precision, where the parameters are; else all are float32.

    Attributes:
        views: The numbers of each parameter, by its name.
    """

    def __init__(self, prefix: str, *, keeps_kind: bool = False) -> None:
        self._prefix = prefix
        self._keeps_kind = keeps_kind
        self._flats: dict[int, Tensor] = {}
        self.views: dict[str, Tensor] = {}

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Keep what is known of each parameter for these buckets.

        Cost: Allocates 4 bytes an element.
        """
        # Views keep the old memory alive until what is in it has been copied to the new places.
        known = dict(self.views)
        self.views.clear()
        self._flats.clear()
        for bucket in buckets:
            kind = bucket.payload.dtype if self._keeps_kind else torch.float32
            dtype = torch.promote_types(kind, torch.float32)
            flat = torch.zeros_like(bucket.payload, dtype=dtype)
            for position, name in enumerate(bucket.names):
                place = bucket.place(position, flat)
                if name in known:
                    place.copy_(known[name])
                self.views[name] = place
            self._flats[bucket.index] = flat

    def of(self, bucket: Bucket) -> Tensor:
        """What is remembered of a bucket, as its payload lies."""
        return self._flats[bucket.index]

    def state_dict(self) -> dict[str, Tensor]:
        """`prefix.<parameter>` to its tensor, not copied."""
        return {f"{self._prefix}.{name}": view for name, view in self.views.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead; parameters that are missing begin at zero."""
        fill(self.state_dict().items(), state)


def fill(places: Iterable[tuple[str, Tensor]], state: Mapping[str, Tensor]) -> None:
    """Copy what was saved into its place, by name; what was not is zero."""
    for name, place in places:
        if (saved := state.get(name)) is None:
            place.zero_()
        else:
            place.copy_(saved)
