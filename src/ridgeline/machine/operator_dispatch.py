"""`OperatorDispatch`: what one small operator of a class costs the host, forward and backward."""

from typing import Literal

from ridgeline.codec import Value
from ridgeline.machine.quantity import Sampled

OperatorClass = Literal[
    "elementwise",
    "reduction",
    "matmul",
    "convolution",
    "normalization",
    "view",
    "random",
    "copy",
    "optimizer",
]


class OperatorDispatch(Value, frozen=True, kw_only=True):
    """Host seconds of a call of one class that is too small for its work to count.

    Samples of one place were taken in one round, and belong together.
    """

    device: Literal["cpu", "cuda"]
    kind: OperatorClass
    call: str
    """What was called, on what shapes."""
    plain: Sampled
    """Without a record for backward."""
    recorded: Sampled | None = None
    """With one; None where no gradient passes."""
    backward: Sampled | None = None
    """Of all that backward issues for one call, gradients of its weights included."""

    @property
    def recording(self) -> Sampled | None:
        """Seconds that the record adds to a call; 0 where a sample without it took longer."""
        if self.recorded is None:
            return None
        # Taken in pairs: between rounds clocks change more than a record costs.
        pairs = zip(self.recorded.samples, self.plain.samples, strict=True)
        return Sampled.measured([max(0.0, with_ - without) for with_, without in pairs], "s")

    @property
    def backward_share(self) -> Sampled | None:
        """Share of backward in the host's seconds of a call that is recorded and gone back through."""
        if self.recorded is None or self.backward is None:
            return None
        pairs = zip(self.recorded.samples, self.backward.samples, strict=True)
        return Sampled.measured([back / (there + back) for there, back in pairs], "")
