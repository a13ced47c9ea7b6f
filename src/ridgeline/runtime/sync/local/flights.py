"""Exchanges that are on their way while steps continue: from their start until their means are used."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ridgeline.engine import Engine
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.parameter_memory import fill
from ridgeline.runtime.sync.transports.transport import Transport


class Flights:
    """Starts the reduction of buckets, and waits for it later.

    Args:
        transport: Reduces them. One that blocks has a group of its own where steps continue meanwhile: the
            workers' threads come to its collectives at other moments than to those of their steps.
        device: Where they are. What is to continue beside steps runs on a stream of its own on a GPU, and in
            a thread of its own on a CPU, if it blocks.
        is_beside: Whether steps continue meanwhile.
    """

    def __init__(self, transport: Transport, device: torch.device, *, is_beside: bool) -> None:
        self._transport = transport
        on_device = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_beside and on_device else None
        self._engine = Engine() if is_beside and not on_device and transport.blocks else None
        self._waits: dict[int, Callable[[], object]] = {}
        self._ends: dict[int, torch.cuda.Event] = {}

    def start(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket, which is not to be read or written until `wait`."""
        if self._engine is not None:
            reduced = self._engine.variable(bucket.names[0])
            self._waits[bucket.index] = functools.partial(self._engine.wait, reduced)
            reduce = functools.partial(self._transport.reduce, bucket)
            self._engine.push(reduce, writes=(reduced,), lane="communication", name="reduce")
            return
        with self._aside():
            future = self._transport.reduce(bucket)
            if self._stream is not None:
                self._ends[bucket.index] = torch.cuda.Event()
                self._ends[bucket.index].record(self._stream)
        if future is not None:
            self._waits[bucket.index] = future.wait

    def wait(self, buckets: Iterable[Bucket]) -> None:
        """Wait until some buckets are reduced; on a GPU, the stream waits."""
        for bucket in buckets:
            if (wait := self._waits.pop(bucket.index, None)) is not None:
                wait()
            # Not the stream: a fragment may have started just now that is to travel beside the next steps.
            # Kept until the next start, since state may be read on another stream than a fragment lands on.
            if (end := self._ends.get(bucket.index)) is not None:
                torch.cuda.current_stream().wait_event(end)

    def state_dict(self, buckets: Sequence[Bucket]) -> dict[str, Tensor]:
        """`flying.<parameter>` to what the workers' mean amounts to in these buckets, not copied.

        Cost: Waits for them.
        """
        self.wait(buckets)
        return {name: place for bucket in buckets for name, place in _places(bucket)}

    def load_state_dict(self, state: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
        """Have these buckets reduced to that; what is missing has changed nothing."""
        fill((named for bucket in buckets for named in _places(bucket)), state)

    def close(self) -> None:
        """End the thread; nothing is on its way any more."""
        if self._engine is not None:
            self._engine.close()

    def _aside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def _places(bucket: Bucket) -> Iterable[tuple[str, Tensor]]:
    for position, name in enumerate(bucket.names):
        yield f"flying.{name}", bucket.place(position, bucket.payload)
