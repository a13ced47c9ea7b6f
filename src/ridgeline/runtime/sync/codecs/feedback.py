"""Error feedback: what a lossy codec left out of one step is added in the next.

Over all steps, what arrived plus what is left is the sum of all gradients.

Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.parameter_memory import ParameterMemory


class ErrorFeedback(ParameterMemory):
    """What was left out so far, of the gradients in some buckets.

    A worker sends what it left out of a parameter before also in steps in which it does not use it: the owner
    of a share is left what rounding the mean loses, and may never use it itself. Where no worker used it, the
    mean is dropped, and `put_back` has all of them remember what they did before.
    """

    def __init__(self) -> None:
        super().__init__("residual")
        self._before: dict[int, list[tuple[int, Tensor]]] = {}

    def arranged(self, buckets: Sequence[Bucket]) -> None:
        """See `ParameterMemory`."""
        self._before.clear()
        super().arranged(buckets)

    def added(self, bucket: Bucket) -> Tensor:
        """The payload and what was left out before: the memory itself, for `keep` to be called after."""
        values = self.of(bucket)
        # Which of these others use is known only behind the exchange.
        missing = [(p, bucket.place(p, values).clone()) for p in bucket.missing]
        self._before[bucket.index] = missing
        return values.add_(bucket.payload)

    def keep(self, bucket: Bucket) -> None:
        """Remember what is left in the memory; what is no finite number is not remembered.

        One overflow would stay for ever otherwise.
        """
        self.of(bucket).nan_to_num_(0.0, 0.0, 0.0)

    def put_back(self, bucket: Bucket, positions: Collection[int]) -> None:
        """Nothing was sent of the parameters at some positions after all, for no worker used them."""
        for position, before in self._before.pop(bucket.index, ()):
            if position in positions:
                bucket.place(position, self.of(bucket)).copy_(before)
