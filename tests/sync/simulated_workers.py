"""Workers as threads of this process, in lockstep: what a codec does, with no process group and no start.

The exchange, error feedback and state are the runtime's; only what crosses the wire is handed over in memory.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ridgeline.plan import Sync
from ridgeline.runtime.sync.buckets.arrangement import arrange
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.codecs.compressed import Compressed
from ridgeline.runtime.sync.loading import load
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import COMPRESSIONS, values_of


class OtherFailedError(Exception):
    """Ends a thread whose counterpart has failed."""


class Channel:
    """Hands each of some threads what all have brought.

    They run one at a time, each until it has brought something: in turns, none of them waits for the
    interpreter, which takes longer than a step.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.shapes: list[tuple[int, ...]] = []
        self._brought: list[Any] = []
        self._turns: list[threading.Semaphore] = []
        self._is_broken = False

    def all(self, rank: int, value: Tensor) -> list[Tensor]:
        if rank == 0:
            self._brought = []
            self.shapes.append(tuple(value.shape))
        brought = self._brought
        assert len(brought) == rank, "each brings as often as the others"
        brought.append(value)
        self._end_turn(rank)
        self._turns[rank].acquire()
        if self._is_broken:
            raise OtherFailedError
        return list(brought)

    def _end_turn(self, rank: int) -> None:
        self._turns[(rank + 1) % self.size].release()

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work(rank)` returns for each rank."""
        self._turns = [threading.Semaphore(0) for _ in range(self.size)]
        self._is_broken = False
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            self._turns[rank].acquire()
            try:
                results[rank] = work(rank)
            except OtherFailedError:
                pass
            except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
                errors.append(error)
                self._is_broken = True
            self._end_turn(rank)

        threads = [threading.Thread(target=call, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._end_turn(-1)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class Summing(Transport):
    """The mean, added up in the order of ranks."""

    def __init__(self, channel: Channel, rank: int) -> None:
        world: Any = SimpleNamespace(
            device=torch.device("cpu"),
            group=lambda _: None,
            axis_size=lambda _: channel.size,
            axis_rank=lambda _: rank,
        )
        super().__init__(world, {})
        self._channel = channel

    def mean(self, values: Tensor) -> None:
        values.copy_(sum(self._channel.all(self.rank, values.clone())) / self.size)


class Simulated(Compressed):
    """A codec among threads."""

    def __init__(self, channel: Channel, rank: int, sync: Sync, codec: str = "") -> None:
        entry = COMPRESSIONS[sync.compression]
        made = load(codec or entry.codec)(values_of(sync))
        super().__init__(Summing(channel, rank), made, entry)
        self._channel = channel

    def _gather(self, part: Tensor) -> Tensor:
        self.count(part)
        return torch.stack(self._channel.all(self.rank, part))

    def _scatter(self, rows: Tensor) -> Tensor:
        self.count(rows)
        return torch.stack([given[self.rank] for given in self._channel.all(self.rank, rows)])


class Worker:
    """One worker that reduces gradients of some parameters in every step.

    Args:
        channel: To the others.
        rank: Of this one.
        sync: Compression and buckets.
        shapes: Of the parameters `p0`, `p1` and so on.
        dtype: Of all of them.
    """

    def __init__(
        self,
        channel: Channel,
        rank: int,
        sync: Sync,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        codec: str = "",
    ) -> None:
        self.sync = sync
        self.transport = Simulated(channel, rank, sync, codec)
        self.named = [
            (f"p{n}", nn.Parameter(torch.zeros(s, dtype=dtype))) for n, s in enumerate(shapes)
        ]
        self.buckets: tuple[Bucket, ...] = ()
        self.cut(range(len(shapes)), sync.bucket_bytes)

    def cut(self, order: Sequence[int], bucket_bytes: Sequence[int]) -> None:
        """Cut the buckets again."""
        layout = arrange(
            self.named,
            list(order),
            msgspec.structs.replace(self.sync, bucket_bytes=tuple(bucket_bytes)),
            workers=self.transport.size,
            has_buffers=False,
        )
        self.buckets = layout.buckets
        self.transport.arranged(self.buckets)

    def reduce(
        self, gradients: Mapping[str, Tensor], unused: Collection[str] = ()
    ) -> dict[str, Tensor]:
        """What arrives of gradients; those that are not given are missing, on all workers if `unused`."""
        arrived = {}
        for bucket in self.buckets:
            bucket.arrived = [name in gradients for name in bucket.names]
            bucket.blank_missing()
            for name, view in zip(bucket.names, bucket.views, strict=True):
                if name in gradients:
                    view.copy_(gradients[name])
            self.transport.reduce(bucket)
            arrived |= {
                name: view.clone() for name, view in zip(bucket.names, bucket.views, strict=True)
            }
            dropped = [n for n, name in enumerate(bucket.names) if name in unused]
            for position in dropped:
                arrived[bucket.names[position]].zero_()
            self.transport.dropped(bucket, dropped)
        return arrived

    def residuals(self) -> dict[str, Tensor]:
        """What was left out of each parameter."""
        head = "residual."
        state = self.transport.state_dict()
        return {n.removeprefix(head): t for n, t in state.items() if n.startswith(head)}
