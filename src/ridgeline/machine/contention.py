"""`Overlap` and `Contention`: how much computing and transferring slow each other where both run at once."""

from typing import Literal

from ridgeline.codec import Value
from ridgeline.laws.arguments import check
from ridgeline.machine.quantity import LEAST, MOST, Quantity, Sampled, check_unit
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

    def __post_init__(self) -> None:
        """Reject slowdowns that are none by a `LawError`: the gain is made of their inverses."""
        for name in ("compute_slowdown", "transfer_slowdown"):
            slowdown = getattr(self, name)
            check_unit(name, slowdown, "x")
            check(name, slowdown.value, least=LEAST, most=MOST)

    @property
    def gain(self) -> float:
        """Work done at once over that done one after the other: 2.0 where neither slows, 1.0 for nothing."""
        # Each does 1 / slowdown of what it does alone in the same time.
        return 1.0 / self.compute_slowdown.value + 1.0 / self.transfer_slowdown.value


class Overlap(Value, frozen=True, kw_only=True):
    """How much computing and communicating slow each other when both run at once (1.0: not at all).

    `kernel` is how long the kernels took that computing consisted of: a GPU full of a long one leaves the
    collective's kernels waiting. None on CPUs.

    `gain` is work done at once over that done one after the other: 2.0 where neither slows, 1.0 for nothing.
    None on GPUs, where each slowdown is measured by itself. On CPUs it is steadier than they are: the
    scheduler gives now one side more of a core and now the other.
    """

    setting: Setting
    compute_slowdown: Quantity
    communication_slowdown: Quantity
    kernel: Quantity | None = None
    gain: Quantity | None = None

    def __post_init__(self) -> None:
        """Reject kernels that take no time by a `LawError`: lengths are compared by their logarithm."""
        check_unit("the slowdown of computing", self.compute_slowdown, "x")
        check_unit("the slowdown of communicating", self.communication_slowdown, "x")
        if self.gain is not None:
            check_unit("the gain by overlap", self.gain, "x")
            check("gain", self.gain.value, least=LEAST, most=MOST)
        if self.kernel is not None:
            check_unit("the length of kernels", self.kernel, "s")
            check("kernel in s", self.kernel.value, least=LEAST, most=MOST)

    def slowdowns(self) -> tuple[float, float]:
        """Of computing and of communicating, 1.0 at least; they add up to the gain where one is known.

        Medians of two numbers that rise and fall against each other would promise more than any round gave.
        """
        compute = max(1.0, self.compute_slowdown.value)
        communication = max(1.0, self.communication_slowdown.value)
        if self.gain is not None:
            factor = (1.0 / compute + 1.0 / communication) / self.gain.value
            compute, communication = compute * factor, communication * factor
        # Below 1 is noise: nothing gets faster by what runs beside it.
        return max(1.0, compute), max(1.0, communication)
