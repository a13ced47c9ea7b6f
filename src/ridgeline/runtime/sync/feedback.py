"""Error feedback: what a lossy codec left out of one step is added in the next.

Over all steps, what arrived plus what is left is the sum of all gradients.

Source: Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes", ICML 2019.
"""

import torch
from torch import Tensor

from ridgeline.runtime.sync.buckets import Bucket
from ridgeline.runtime.sync.parameter_memory import ParameterMemory


class ErrorFeedback(ParameterMemory):
    """What was left out so far, of the gradients in some buckets.

    A parameter that this worker did not use has nothing to send, neither now nor of what was left out before:
    where no worker used it, its mean is dropped and would be lost.
    """

    def __init__(self) -> None:
        super().__init__("residual")

    def added(self, bucket: Bucket) -> Tensor:
        """The payload and what was left out before: float32 in memory of its own.

        Cost: Allocates 4 bytes an element of the bucket.
        """
        values = torch.add(self.of(bucket), bucket.payload.float())
        for position in bucket.missing:
            bucket.place(position, values).zero_()
        return values

    def keep(self, bucket: Bucket, wanted: Tensor, sent: Tensor) -> None:
        """Remember what was to be sent and was not; what is no finite number is not remembered.

        One overflow would stay for ever otherwise.
        """
        residual = self.of(bucket)
        held = [(p, bucket.place(p, residual).clone()) for p in bucket.missing]
        torch.sub(wanted, sent, out=residual)
        for position, before in held:
            bucket.place(position, residual).add_(before)
        residual.nan_to_num_(0.0, 0.0, 0.0)
