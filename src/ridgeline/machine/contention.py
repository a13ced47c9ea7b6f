"""`Contention`: how much one family of operators and one kind of transfer slow each other at once."""

from typing import Literal

from ridgeline.codec import Value
from ridgeline.machine.quantity import Sampled
from ridgeline.machine.setting import Setting

ComputeFamily = Literal["matmul", "convolution", "elementwise"]
TransferKind = Literal["collective", "host_to_device", "device_to_host"]


class Contention(Value, frozen=True, kw_only=True):
    """Slowdowns, 1.0 for none, while operators of a family and transfers both run all the time.

    `call` says what was computed and `message_bytes` how much one transfer moves. A `collective` is an
    all-reduce.
    """

    setting: Setting
    family: ComputeFamily
    call: str
    transfer: TransferKind
    message_bytes: int
    compute_slowdown: Sampled
    transfer_slowdown: Sampled

    @property
    def gain(self) -> float:
        """Work done at once over that done one after the other: 2.0 where neither slows, 1.0 for nothing."""
        # Each does 1 / slowdown of what it does alone in the same time.
        return 1.0 / self.compute_slowdown.value + 1.0 / self.transfer_slowdown.value
