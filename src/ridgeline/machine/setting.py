"""`Setting`: how many processes share a device, and with how many threads each."""

from typing import Annotated, Literal

from msgspec import Meta

from ridgeline.codec import Value


class Setting(Value, frozen=True, kw_only=True):
    """How a device is shared: `workers` processes at once, `threads` each (0 on GPUs)."""

    device: Literal["cpu", "cuda"]
    workers: Annotated[int, Meta(ge=1)] = 1
    threads: Annotated[int, Meta(ge=0)] = 0

    def __str__(self) -> str:
        # Each GPU serves one worker, whose threads only issue its work.
        if self.device == "cuda":
            return f"{self.workers} x cuda"
        return f"{self.workers} x {self.threads} cpu threads"
