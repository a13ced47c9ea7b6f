"""Channels: what a ring of buffers needs of the device, in few words, so that the ring knows no device.

A channel has one stream of its own for copies; the consumer's stream is whatever is current where it
asks. `HostChannel` does everything at once, in the calling thread.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

Moment = Any
"""A point in a stream's work: a CUDA event, or seconds where everything happens at once."""


class Channel(Protocol):
    """Copies in one direction between host memory and one device."""

    @property
    def device(self) -> torch.device:
        """The device at the other end."""

    def active(self) -> AbstractContextManager[Any]:
        """Make the device the current one in this thread."""

    def takes(self, leaf: Tensor) -> bool:
        """Whether this tensor has to travel."""

    def needs_staging(self, leaf: Tensor) -> bool:
        """Whether it must be copied to pinned memory first."""

    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised host memory, (numel,), that copies can use."""

    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised device memory, (numel,), for the channel's stream."""

    def now(self) -> Moment:
        """What the consumer's current stream has been given so far."""

    def consumer(self) -> Any:
        """The consumer's current stream."""

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Moment]
    ) -> tuple[Moment, Moment]:
        """Enqueue `target <- source` for all pairs once `after` has happened; begin and end."""

    def follow(self, moment: Moment) -> None:
        """Make the consumer's current stream wait for a moment."""

    def wait(self, moment: Moment) -> None:
        """Make the host wait for a moment."""

    def is_over(self, moment: Moment) -> bool:
        """Whether it has happened."""

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Time between two moments that are over."""

    def give_away(self, memory: Tensor, stream: Any) -> None:
        """Other code owns this device memory now, and uses it on `stream`."""


class HostChannel:
    """From host memory to host memory; every copy is over when the call returns."""

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def active(self) -> AbstractContextManager[Any]:
        """There is nothing to choose."""
        return nullcontext()

    def takes(self, leaf: Tensor) -> bool:
        """Every tensor."""
        return True

    def needs_staging(self, leaf: Tensor) -> bool:
        """Never: nothing is gained by a further copy."""
        return False

    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Ordinary memory."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    empty_device = empty_host

    def now(self) -> Moment:
        """The clock."""
        return time.perf_counter()

    def consumer(self) -> Any:
        """There are no streams."""
        return None

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Moment]
    ) -> tuple[Moment, Moment]:
        """Copy."""
        begin = time.perf_counter()
        for target, source in pairs:
            target.copy_(source)
        return begin, time.perf_counter()

    def follow(self, moment: Moment) -> None:
        """It has happened."""

    wait = follow

    def is_over(self, moment: Moment) -> bool:
        """Always."""
        return True

    def seconds(self, begin: Moment, end: Moment) -> float:
        """Their difference."""
        return end - begin

    def give_away(self, memory: Tensor, stream: Any) -> None:
        """Python counts the references."""


class CudaChannel:
    """To one GPU, given with its index, or from it, on a stream of its own; host memory is pinned."""

    def __init__(self, device: torch.device, *, inward: bool) -> None:
        self._device = device
        self._inward = inward
        self._stream = torch.cuda.Stream(device)

    @property
    def device(self) -> torch.device:
        """The GPU."""
        return self._device

    def active(self) -> AbstractContextManager[Any]:
        """A new thread would begin on GPU 0, and pinning there would occupy that one, too."""
        return torch.cuda.device(self._device)

    def takes(self, leaf: Tensor) -> bool:
        """A host tensor on its way in, a tensor of this GPU on its way out."""
        return leaf.device.type == "cpu" if self._inward else leaf.device == self._device

    def needs_staging(self, leaf: Tensor) -> bool:
        """Pageable memory would make the copy synchronous."""
        return not leaf.is_pinned()

    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Pinned memory.

        Cost: Pinning takes about a millisecond per 10 MB, unless torch has such a block from before.
        """
        return torch.empty(numel, dtype=dtype, pin_memory=True, device="cpu")

    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the channel's stream, which alone it must be written on first."""
        with torch.cuda.stream(self._stream):
            return torch.empty(numel, dtype=dtype, device=self._device)

    def now(self) -> Moment:
        """An event on the consumer's current stream."""
        return self.consumer().record_event(self._event())

    def consumer(self) -> torch.cuda.Stream:
        """The stream that is current for the GPU in this thread."""
        return torch.cuda.current_stream(self._device)

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[Moment]
    ) -> tuple[Moment, Moment]:
        """Asynchronous copies on the channel's stream."""
        with torch.cuda.stream(self._stream):
            for moment in after:
                self._stream.wait_event(moment)
            begin = self._stream.record_event(self._event())
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return begin, self._stream.record_event(self._event())

    def follow(self, moment: Moment) -> None:
        """Waits on the device."""
        self.consumer().wait_event(moment)

    def wait(self, moment: Moment) -> None:
        """Waits without occupying a core."""
        # To ask is cheap, and to sleep and be woken costs tens of microseconds though it is over.
        if not moment.query():
            moment.synchronize()

    def is_over(self, moment: Moment) -> bool:
        """Asks the device, without waiting."""
        return moment.query()

    def seconds(self, begin: Moment, end: Moment) -> float:
        """By the device's clock; resolution about half a microsecond."""
        return begin.elapsed_time(end) * 1e-3

    def give_away(self, memory: Tensor, stream: Any) -> None:
        """The allocator may use it again only after what `stream` was given before it is freed."""
        if memory.is_cuda and stream is not None:
            memory.record_stream(stream)

    def _event(self) -> torch.cuda.Event:
        # Blocking: the host sleeps in `synchronize`, where other events keep a core busy that loads data.
        return torch.cuda.Event(enable_timing=True, blocking=True)
