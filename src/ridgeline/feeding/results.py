"""Results stream to the host while the next ones are computed.

The iterable that makes the results is asked `depth` ahead, so that its kernels are enqueued; every
result is copied on a stream of its own into a ring of pinned memory as soon as it is computed. The host
waits for one copy at a time, and never for the computation behind it.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.errors import PlanError
from ridgeline.feeding.buffers import Buffer, is_plain, layout_of
from ridgeline.feeding.channel import Channel, CudaChannel, Moment
from ridgeline.feeding.meter import Meter, Totals, Trace
from ridgeline.feeding.own_memory import address_of
from ridgeline.feeding.report import CopyReport, bounding_stage, hidden_share
from ridgeline.feeding.slots import Slot
from ridgeline.feeding.stream import Stream, check_depth
from ridgeline.given import checked


@checked(PlanError, but=("tensors", "depth"))
def to_host(tensors: Iterable[Any], depth: int = 2) -> "ToHost":
    """The same results in host memory, in order, copied while the next ones are computed.

    Args:
        tensors: Makes nests of tensors of one GPU, such as a generator that computes them; asked in the
            caller's thread, on the stream that is current there. Every result needs memory of its
            own: what is computed into the same memory again must be yielded as a `clone()`.
        depth: Results whose computation is enqueued ahead; 0 waits for every single one.

    Returns:
        An iterator of nests with every tensor of the GPU replaced by one in pinned memory, detached;
        tensors of the CPU and everything else pass as they are. It is a context manager and has
        `close()` and `report()`. A result stays valid as long as it, or a view of it, is referenced.

    Raises:
        PlanError: `tensors` cannot be iterated; `depth` is no whole number, negative or above 65536; in the
            iteration: results come from several GPUs, or in memory whose copy is not over yet.
        Exception: in the iteration, whatever the iterable raises, unchanged, at its place.

    Cost: `depth + 2` results of pinned memory, and one more for each that is held: to keep many large
        results, copy them out of it. The host waits for the copy of the result that it is given.
    """
    check_depth(depth, 0, "to_host(...); 2 serves most programs")
    if not isinstance(tensors, Iterable) and not hasattr(tensors, "__getitem__"):
        raise PlanError(
            f"wanted an iterable of results, got {type(tensors).__name__} in to_host(...); pass a generator "
            "or a list"
        )
    return ToHost(tensors, depth)


class ToHost(Stream):
    """Results in host memory, in order; made by `rl.to_host`."""

    def __init__(self, tensors: Iterable[Any], depth: int, channel: Channel | None = None) -> None:
        super().__init__()
        self._iterator = iter(tensors)
        self._depth = depth
        self._channel = channel
        self._meter: Meter | None = None
        # A loop still refers to its last result while it asks for the next: that slot rests one round.
        self._free: deque[Slot] = deque(Slot() for _ in range(depth + 2))
        self._ahead: deque[Slot] = deque()
        self._lent: Slot | None = None
        self._has_all = False
        self._is_over = False
        self._results = self._num_bytes = self._num_given_away = 0
        self._making_s = self._waited_s = 0.0

    def _next(self) -> Any:
        """The next result on the host; see `to_host` for what may be raised."""
        if self._is_over:
            raise StopIteration
        while not self._has_all and len(self._ahead) <= self._depth:
            slot = self._free[0]
            self._ask(slot)
            self._ahead.append(self._free.popleft())
        slot = self._ahead.popleft()
        if slot.error is not None:
            self._stop(slot)
        content, slot.content = slot.content, None
        self._land(slot)
        if self._lent is not None:
            self._free.append(self._lent)
        self._lent = slot
        self._results += 1
        self._num_bytes += slot.num_bytes
        return content

    def report(self) -> CopyReport:
        """What was copied so far, and how much of it computation hid.

        Cost: Waits for the computation of the results handed over.
        """
        totals = self._meter.totals() if self._meter else Totals()
        return CopyReport(
            direction="out",
            device=str(self._channel.device) if self._channel else "cpu",
            batches=self._results,
            num_bytes=self._num_bytes,
            loading_s=self._making_s,
            copy_s=totals.copy_s,
            compute_s=totals.compute_s,
            waited_s=self._waited_s,
            hidden=hidden_share(covered=totals.covered_s, total=totals.copy_s),
            given_away=self._num_given_away,
            bound=bounding_stage(
                loading_s=self._making_s, copy_s=totals.copy_s, compute_s=totals.compute_s
            ),
        )

    def close(self) -> None:
        """Forget what is under way; results that are held stay valid. Safe to call twice."""
        self._is_over = True
        # Let go of, with what a generator holds: its models would live as long as this object.
        self._iterator = iter(())
        self._ahead.clear()
        self._free.clear()
        self._lent = None

    def _ask(self, slot: Slot) -> None:
        """Have the next result computed, and its copy enqueued."""
        begin = time.perf_counter()
        slot.begun = self._channel.now() if self._channel else None
        try:
            result = next(self._iterator)
            leaves, structure = pytree.tree_flatten(result)
            self._check_memory(leaves)
            self._pack(slot, leaves)
        except Exception as error:  # noqa: BLE001 - StopIteration too; it belongs after the results before
            self._has_all = True
            slot.error = error
            return
        finally:
            self._making_s += time.perf_counter() - begin
        slot.content = pytree.tree_unflatten(leaves, structure)

    def _pack(self, slot: Slot, leaves: list[Any]) -> None:
        """Put host memory in the place of the device's leaves, and enqueue their copies."""
        slot.num_bytes, slot.copied = 0, None
        pairs: list[tuple[Tensor, Tensor]] = []
        origins = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for index, leaf in enumerate(leaves):
            channel = self._channel_of(leaf)
            if channel is None:
                continue
            source = leaf.detach().resolve_conj().resolve_neg()
            if not is_plain(source):
                leaves[index] = source.cpu()
                continue
            buffer = slot.hosts.setdefault((index, leaf.dtype), Buffer(channel.empty_host))
            if buffer.is_held:
                buffer.drop()
                self._num_given_away += 1
            leaves[index] = buffer.view(layout_of(source), leaf.dtype)
            pairs.append((leaves[index], source))
        # Their memory must not be computed into before the copies are over.
        slot.sources = [*origins, *(source for _, source in pairs)]
        if pairs and self._channel is not None:
            made = self._channel.now()
            slot.freed = made
            slot.copied = self._channel.copy(pairs, [made])
            slot.num_bytes = sum(source.nbytes for _, source in pairs)

    def _land(self, slot: Slot) -> None:
        """Wait until the slot's copies are over, and let their sources go."""
        if slot.copied is not None and self._channel is not None and self._meter is not None:
            begin = time.perf_counter()
            self._channel.wait(slot.copied[1])
            self._waited_s += time.perf_counter() - begin
            begun: Moment = slot.begun if slot.begun is not None else slot.freed
            self._meter.add(Trace(slot.copied, (begun, slot.freed)))
        slot.sources = []

    def _channel_of(self, leaf: Any) -> Channel | None:
        """The channel that carries the leaf; None for what is on the host already."""
        if not isinstance(leaf, Tensor):
            return None
        if self._channel is None and leaf.is_cuda:
            self._channel = CudaChannel(leaf.device, inward=False)
        channel = self._channel
        if channel is not None and self._meter is None:
            self._meter = Meter(channel, self._depth + 2)
        if channel is not None and channel.takes(leaf):
            return channel
        if leaf.is_cuda and channel is not None:
            raise PlanError(
                f"wanted results of one device, got {channel.device} and {leaf.device} in "
                "to_host(...); use one to_host for each device"
            )
        return None

    def _check_memory(self, leaves: list[Any]) -> None:
        """Refuse a result in memory that is still being copied: it has been overwritten meanwhile."""
        taken = {address_of(source) for slot in self._ahead for source in slot.sources} - {0}
        for leaf in leaves:
            if address_of(leaf) in taken:
                raise PlanError(
                    f"wanted every result in memory of its own, got {tuple(leaf.shape)} "
                    f"{str(leaf.dtype).removeprefix('torch.')} in the memory of an earlier result that is "
                    "not copied yet, in to_host(...); yield its clone()"
                )
