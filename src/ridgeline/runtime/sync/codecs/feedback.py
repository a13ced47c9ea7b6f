"""Error feedback: what a lossy codec left out of one step is added in the next.

Over all steps, what arrived plus what is left is the sum of all gradients.

Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

from torch import Tensor

from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.parameter_memory import ParameterMemory


class ErrorFeedback(ParameterMemory):
    """What was left out so far, of the gradients in some buckets.

    A parameter that this worker did not use has nothing to send, neither now nor of what was left out before:
    where no worker used it, its mean is dropped and would be lost.
    """

    def __init__(self) -> None:
        super().__init__("residual")
        self._held: list[tuple[int, Tensor]] = []

    def added(self, bucket: Bucket) -> Tensor:
        """The payload and what was left out before: the memory itself, for `keep` to be called after."""
        values = self.of(bucket)
        self._held = [(p, bucket.place(p, values).clone()) for p in bucket.missing]
        values.add_(bucket.payload)
        for position, _ in self._held:
            bucket.place(position, values).zero_()
        return values

    def keep(self, bucket: Bucket) -> None:
        """Remember what is left in the memory; what is no finite number is not remembered.

        One overflow would stay for ever otherwise.
        """
        residual = self.of(bucket)
        for position, before in self._held:
            bucket.place(position, residual).add_(before)
        self._held = []
        residual.nan_to_num_(0.0, 0.0, 0.0)
