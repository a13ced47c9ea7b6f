"""Values as slices that servers hold, and what is asked of these: pure functions of parts and tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.runtime.kvstore.arguments import Held, Key
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, ValueSlot
from ridgeline.runtime.kvstore.values.placement import LARGE_ELEMENTS, ValuePart, part_of

SLICE_BYTES = 1 << 22
"""Of a message: a server works one in while the next arrives.

Source: 64 MiB in shared memory, two cores, slices of 1, 2 and 4 MiB: 22.8, 15.8 and 14.4 ms; over sockets all
took 40 ms. BytePS takes 4 MB, BYTEPS_PARTITION_BYTES."""


class Asked(NamedTuple):
    """A call and the tensors that go with it.

    Attributes:
        take: Given the tensor of the answer as it comes, which is not kept then.
        room: Bytes of that tensor, where they are known.
        place: The number of the server that it is for.
    """

    body: Body
    frames: tuple[Tensor, ...] = ()
    take: Callable[[Tensor], None] | None = None
    room: int = 0
    place: int = 0

    @property
    def num_bytes(self) -> int:
        """Of the tensors that go and come."""
        return self.room + sum(frame.nbytes for frame in self.frames)

    @property
    def num_shared(self) -> int:
        """Bytes that may lie in shared memory: of its frame or the answer's, where there is just one."""
        sent = [frame.nbytes for frame in self.frames]
        return self.room if not sent else sent[0] if len(sent) == 1 and not self.room else 0


class Answered(NamedTuple):
    """An answer and the tensor that came with it."""

    answer: Answer
    tensor: Tensor | None


def sliced(held: Held, parts: Sequence[ValuePart], *, divides: bool) -> tuple[ValuePart, ...]:
    """Parts of about so many bytes, of large values that may be divided; others stay as they are."""
    if not divides or held.shape.numel() < LARGE_ELEMENTS or not held.shape:
        return tuple(parts)
    row_bytes = held.shape[1:].numel() * held.dtype.itemsize
    # Whole rows, since sparse pushes and pulls go by rows.
    rows = max(1, SLICE_BYTES // max(row_bytes, 1))
    return tuple(
        ValuePart(part.place, start, min(start + rows, part.stop))
        for part in parts
        for start in range(part.start, part.stop, rows)
    )


def pushes(
    key: Key, total: Tensor, parts: Sequence[ValuePart], compression: KeyedCompression | None
) -> list[Asked]:
    """A call for each part of a sum, dense or sparse rows."""
    if total.is_sparse:
        return [_push_of_rows(key, total, part) for part in parts]
    # Whole numbers have no error that could be fed back.
    codec = compression if total.is_floating_point() else None
    return [_push(key, part_of(total, part), part, codec) for part in parts]


def pulls(key: Key, outs: Sequence[Tensor], parts: Sequence[ValuePart]) -> list[Asked]:
    """A call for each part of a value, whose answer goes to its place in `outs`."""
    return [
        Asked(
            wire.Pull(ValueSlot(key, part.start)),
            take=_into(outs, part),
            room=part_of(outs[0], part).nbytes,
            place=part.place,
        )
        for part in parts
    ]


def pulls_of_rows(
    key: Key, outs: Sequence[Tensor], rows: Tensor, parts: Sequence[ValuePart]
) -> list[Asked]:
    """A call for each part of a value, for those of the rows that are in it."""
    found = []
    for part in parts:
        mask = (rows >= part.start) & (rows < part.stop)
        body = wire.Pull(ValueSlot(key, part.start), int(mask.sum()))

        def take(tensor: Tensor, mask: Tensor = mask) -> None:
            for out in outs:
                out[mask.to(out.device)] = tensor.to(out.device)

        found.append(Asked(body, (rows[mask] - part.start,), take, place=part.place))
    return found


def _push(key: Key, piece: Tensor, part: ValuePart, codec: KeyedCompression | None) -> Asked:
    slot, shape = ValueSlot(key, part.start), wire.shape_of(piece)
    if codec is None:
        return Asked(wire.Push(slot, shape), (piece,), place=part.place)
    params: dict[str, Any] = {"type": codec.name, **codec.options}
    coded = codec.encode((key, part.start), piece.reshape(-1))
    return Asked(wire.Push(slot, shape, params), (coded,), place=part.place)


def _push_of_rows(key: Key, total: Tensor, part: ValuePart) -> Asked:
    numbers, rows = total.indices()[0], total.values()
    mask = (numbers >= part.start) & (numbers < part.stop)
    body = wire.PushRows(ValueSlot(key, part.start), wire.shape_of(rows[mask]))
    return Asked(body, (numbers[mask] - part.start, rows[mask]), place=part.place)


def _into(outs: Sequence[Tensor], part: ValuePart) -> Any:
    def take(tensor: Tensor) -> None:
        for out in outs:
            part_of(out, part).copy_(tensor)

    return take
