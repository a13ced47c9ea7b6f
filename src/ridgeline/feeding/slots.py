"""Slots: the ring through which batches travel, host memory and device memory for one batch each.

A slot goes round: *packed* (in the loading thread: into pinned memory, and the copy enqueued),
*received* (the consumer's stream waits for the copy), *lent* (the consumer works with it), *freed* (with
the moment after which it is unused, which the next copy into it waits for on the device).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.engine import Variable
from ridgeline.feeding.buffers import Buffer, is_plain, layout_of
from ridgeline.feeding.channel import Channel, Moment
from ridgeline.feeding.meter import Meter, Trace
from ridgeline.tensors.moving import moved, moves_itself

Place = tuple[int, torch.dtype]
"""Position of a leaf in its batch, and its dtype: what shares one buffer from round to round."""


class Slot:
    """One place in the ring, and the batch in it; `variable` says when it is filled."""

    def __init__(self) -> None:
        self.variable: Variable | None = None
        self.content: Any = None
        self.marks: tuple[Any, ...] = ()
        self.error: BaseException | None = None
        self.hosts: dict[Place, Buffer] = {}
        self.devices: dict[Place, Buffer] = {}
        self.sources: list[Tensor] = []
        self.copied: tuple[Moment, Moment] | None = None
        self.made: Moment | None = None
        self.begun: Moment | None = None
        self.freed: Moment | None = None
        self.stream: Any = None
        self.num_bytes = 0


class Carrier:
    """Carries batches through slots over one channel.

    Args:
        channel: To the device.
        fixed_addresses: Use a slot again even if its last batch is still referenced.
        margin: Batches that may be under way at once.

    Attributes:
        meter: When copies and computation ran.
        num_bytes: Bytes of the batches handed over.
        num_given_away: Buffers left to a consumer that still held them.
    """

    def __init__(self, channel: Channel, *, fixed_addresses: bool, margin: int) -> None:
        self.channel = channel
        self.meter = Meter(channel, margin)
        self.num_bytes = 0
        self.num_given_away = 0
        self._is_fixed = fixed_addresses
        self._largest: dict[Place, int] = {}
        self._lent_by_loader: Moment | None = None

    def pack(self, slot: Slot, batch: Any) -> list[Any]:
        """Enqueue the copy of a batch into the slot's device memory; what of it was not copied."""
        leaves, structure = pytree.tree_flatten(batch, is_leaf=moves_itself)
        pairs: list[tuple[Tensor, Tensor]] = []
        placed = [self._place(slot, i, leaf, pairs) for i, leaf in enumerate(leaves)]
        slot.content = (placed, structure)
        slot.sources = [source for _, source in pairs]  # alive until their copy is over
        slot.num_bytes = sum(source.nbytes for source in slot.sources)
        slot.copied = self.channel.copy(pairs, _known(slot.freed)) if pairs else None
        given = {id(leaf) for leaf in leaves}
        if slot.copied is not None and any(id(source) in given for source in slot.sources):
            self._lent_by_loader = slot.copied[1]
        # What the loader made on a device itself is ordered by its own thread's stream.
        is_made_there = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves)
        slot.made = self.channel.now() if is_made_there else None
        return [leaf for leaf, put in zip(leaves, placed, strict=True) if put is leaf]

    def wait_for_host_memory(self, slot: Slot) -> None:
        """Wait until the slot's last copy has read its pinned memory; a ring ago, usually over."""
        if slot.copied is not None:
            self.channel.wait(slot.copied[1])
            slot.sources = []

    def wait_for_loader_memory(self) -> None:
        """Wait until the last copy has read the loader's own pinned memory, which it may write next.

        Staging would spare the wait, and cost the loading thread more: host memory is slower than the link.
        """
        if self._lent_by_loader is not None:
            self.channel.wait(self._lent_by_loader)
            self._lent_by_loader = None

    def receive(self, slot: Slot) -> Any:
        """The batch, for work on the consumer's current stream."""
        channel = self.channel
        (placed, structure), slot.content = slot.content, None
        for moment in (*_known(slot.copied and slot.copied[1]), *_known(slot.made)):
            channel.follow(moment)
        slot.stream = channel.consumer()
        slot.begun = channel.now()
        self.num_bytes += slot.num_bytes
        return pytree.tree_unflatten([self._arrive(slot, leaf) for leaf in placed], structure)

    def end_work(self, slot: Slot, moment: Moment) -> None:
        """Note that the consumer's work on the slot's batch was enqueued before `moment`."""
        self.meter.add(Trace(slot.copied, (slot.begun, moment)))

    def free(self, slot: Slot, moment: Moment) -> None:
        """Let the slot be packed again, after `moment`; what is still referenced stays as it is."""
        slot.freed = moment
        if self._is_fixed:
            return
        for buffer in slot.devices.values():
            # Somebody holds a batch longer than agreed: the memory is theirs, and the slot gets another.
            if buffer.is_held:
                self._give_away(slot, buffer)
                self.num_given_away += 1

    def end(self, slot: Slot) -> None:
        """Leave the slot's memory to its remaining users."""
        for buffer in slot.devices.values():
            self._give_away(slot, buffer)

    def _place(self, slot: Slot, index: int, leaf: Any, pairs: list[tuple[Tensor, Tensor]]) -> Any:
        """Where the leaf will be on the device; notes the copy that brings it there."""
        if not isinstance(leaf, Tensor) or not is_plain(leaf) or not self.channel.takes(leaf):
            return leaf
        place, layout = (index, leaf.dtype), layout_of(leaf)
        # A slot that begins with a short batch must not have to move its memory for the next whole one.
        largest = self._largest[place] = max(layout.numel, self._largest.get(place, 0))
        source = leaf
        if self.channel.needs_staging(leaf):
            host = _buffer(slot.hosts, place, self.channel.empty_host)
            source = host.view(layout, leaf.dtype, largest)
            source.copy_(leaf)
        buffer = _buffer(slot.devices, place, self.channel.empty_device)
        if not buffer.fits(layout):
            self._give_away(slot, buffer)
        target = buffer.view(layout, leaf.dtype, largest)
        pairs.append((target, source))
        return target

    def _arrive(self, slot: Slot, leaf: Any) -> Any:
        """What the ring could not carry travels now, on the consumer's stream."""
        if not isinstance(leaf, Tensor):
            return leaf if self.channel.device.type == "cpu" else moved(self.channel.device, leaf)
        if leaf.device == self.channel.device:
            if slot.made is not None and leaf.layout is torch.strided:
                self.channel.give_away(leaf, slot.stream)
            return leaf
        return moved(self.channel.device, leaf)

    def _give_away(self, slot: Slot, buffer: Buffer) -> None:
        if buffer.memory is not None:
            self.channel.give_away(buffer.memory, slot.stream)
            buffer.drop()


def _buffer(
    buffers: dict[Place, Buffer], place: Place, allocate: Callable[[int, torch.dtype], Tensor]
) -> Buffer:
    buffer = buffers.get(place)
    if buffer is None:
        buffer = buffers[place] = Buffer(allocate)
    return buffer


def _known(moment: Moment | None) -> tuple[Moment, ...]:
    return () if moment is None else (moment,)
