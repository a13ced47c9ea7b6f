"""Error feedback: what a lossy codec left out of one step is added in the next.

Kept in single precision and keyed by parameter, so that it survives new buckets and checkpoints. Over all
steps, what arrived plus what is left is the sum of all gradients.

Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets import Bucket

PREFIX = "residual."


class ErrorFeedback:
    """What was left out so far, of the gradients in some buckets."""

    def __init__(self) -> None:
        self._flats: dict[int, Tensor] = {}
        self._views: dict[str, Tensor] = {}

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """Keep what is known of each parameter for these buckets."""
        known = dict(self._views)
        self._views.clear()
        self._flats.clear()
        for bucket in buckets:
            flat = torch.zeros_like(bucket.payload, dtype=torch.float32)
            start = bucket.payload.storage_offset()
            for name, view in zip(bucket.names, bucket.views, strict=True):
                place = flat.as_strided(view.size(), view.stride(), view.storage_offset() - start)
                if name in known:
                    place.copy_(known[name])
                self._views[name] = place
            self._flats[bucket.index] = flat

    def of(self, bucket: Bucket) -> Tensor:
        """What was left out of a bucket: float32, as its payload lies."""
        return self._flats[bucket.index]

    def keep(self, bucket: Bucket, wanted: Tensor, sent: Tensor) -> None:
        """Remember what was to be sent and was not; what is no finite number is not remembered.

        One overflow would stay for ever otherwise.
        """
        residual = torch.sub(wanted, sent, out=self._flats[bucket.index])
        residual.nan_to_num_(0.0, 0.0, 0.0)

    def state_dict(self) -> dict[str, Tensor]:
        """`residual.<parameter>` to its tensor, not copied."""
        return {f"{PREFIX}{name}": view for name, view in self._views.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Remember this instead; parameters that are missing begin at zero."""
        for name, view in self._views.items():
            if (saved := state.get(f"{PREFIX}{name}")) is None:
                view.zero_()
            else:
                view.copy_(saved)
