"""Messages between the workers and the servers of an asynchronous store.

A message is a header, which is checked in whole before anything is done, and frames of raw tensors, which are
checked against what the header says. Nothing in it is executed: updaters and optimizers travel by name.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.updaters import SetOptimizer

T = TypeVar("T")
MOST_BYTES = 1 << 30
"""Of a message; slices of values that may be divided are far smaller."""
MOST_HEADER_BYTES = 1 << 16
"""Of a call: names, shapes and settings, but no tensors."""
MOST_KEY_BYTES = 1024
"""Of the name of a key."""
MOST_DIMS = 16
DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"
    )
}  # fmt: skip


class _Body(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """What a worker asks, or a server answers."""


class ValueSlot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A slice of a value, which one server holds: `key`, and the first row."""

    key: Key
    start: int


class Shape(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a frame holds: the name of a type, and a shape."""

    dtype: str
    sizes: tuple[int, ...]

    def num_bytes(self) -> int:
        """Of the frame."""
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize


class Init(_Body, frozen=True, tag="init"):
    """The first value of a slice; one frame. It is taken once, from the first worker that sends it."""

    slot: ValueSlot
    shape: Shape


class Know(_Body, frozen=True, tag="know"):
    """Answer once the slice has a value, which is of this shape."""

    slot: ValueSlot
    shape: Shape


class Push(_Body, frozen=True, tag="push"):
    """A worker's sum for a slice; one frame, compressed where `codec` says so.

    Attributes:
        number: Of this worker's pushes to the slice, from 1 on: it is done once whatever becomes of
            connections and servers. 0: of the next one.
    """

    slot: ValueSlot
    shape: Shape
    codec: dict[str, str | float] | None = None
    number: int = 0


class PushRows(_Body, frozen=True, tag="push_rows"):
    """Rows of a slice, counted from its start; a frame of numbers and one of rows. `number`: as of `Push`."""

    slot: ValueSlot
    shape: Shape
    number: int = 0


class Pull(_Body, frozen=True, tag="pull"):
    """The value of a slice, or its rows in a frame of numbers."""

    slot: ValueSlot
    num_rows: int | None = None


class SetUpdater(_Body, frozen=True, tag="set_updater"):
    """A function that is registered in the server."""

    name: str


class States(_Body, frozen=True, tag="states"):
    """What the optimizer remembers: one frame, in the format of safetensors."""


class LoadStates(_Body, frozen=True, tag="load_states"):
    """Remember this instead; one frame, in the format of safetensors."""

    num_bytes: int


class Barrier(_Body, frozen=True, tag="barrier"):
    """Answer once all workers that are there have asked this as often as this one."""


class Share(_Body, frozen=True, tag="share"):
    """Tensors of this connection may lie in shared memory of this name, if the server is on this host.

    The answer is `is_shared` where it is.
    """

    name: str
    host: str


class Beat(_Body, frozen=True, tag="beat"):
    """The worker is there; the answer says who is."""


class Join(_Body, frozen=True, tag="join"):
    """The worker takes part from now on: barriers wait for it, the next one of the slowest first."""


class Enter(_Body, frozen=True, tag="enter"):
    """The worker pushes to a slice from now on, and is as far as the slowest of those who do.

    Attributes:
        clock: It is at least so far. With `staleness=0`, rounds up to this one continue without it.
    """

    slot: ValueSlot
    clock: int = 0


class Leave(_Body, frozen=True, tag="leave"):
    """The worker is done: no other is to wait for it."""


class Again(_Body, frozen=True, tag="again"):
    """The worker has found this server: what the one before had taken and not written down comes next.

    Attributes:
        barriers: How many it has passed.
    """

    barriers: int


class Whole(_Body, frozen=True, tag="whole"):
    """All of that has come."""


class Cover(_Body, frozen=True, tag="cover"):
    """Answer once a snapshot holds all that was done before."""


Body = (
    Init
    | Know
    | Push
    | PushRows
    | Pull
    | SetOptimizer
    | SetUpdater
    | States
    | LoadStates
    | Barrier
    | Share
    | Beat
    | Join
    | Enter
    | Leave
    | Again
    | Whole
    | Cover
)


class Call(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message to a server.

    Attributes:
        worker: Who asks.
        channel: Which of its connections.
        number: Of the call on that connection, from 1 on; one that comes again is not done again.
        body: What is asked.
        place: Where in shared memory its frame lies, and that of the answer is to; -1: they are sent.
        length: Bytes of its frame there.
        room: Bytes that the answer's may have there.
        epoch: Of the server that it is meant for, which is one more each time a server is replaced.
    """

    worker: int
    channel: int
    number: int
    body: Body
    place: int = -1
    length: int = 0
    room: int = 0
    epoch: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message to a worker.

    Attributes:
        number: Of the call.
        error: Why it was not done; empty where it was.
        is_parked: It waits for other workers; the answer comes later.
        shape: What the frame holds, where there is one.
        is_shared: The frame lies in shared memory, at the place of the call; to `Share`, that there is some.
        versions: By worker. For a pull: how many pushes its value holds; for `Know`: how many have come; for
            `Enter`: how far it is; for `Beat`, `Join` and `Barrier`: to how many barriers each has come who
            is there.
        epoch: Of the server.
        begun: How many snapshots it had begun when it did what was asked.
        durable: Up to which of them all are written; -1: it writes none.
        awaits: The workers for whom a parked call waits.
    """

    number: int
    error: str = ""
    is_parked: bool = False
    shape: Shape | None = None
    is_shared: bool = False
    versions: Mapping[int, int] = {}
    epoch: int = 0
    begun: int = 0
    durable: int = -1
    awaits: tuple[int, ...] = ()


_calls = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Call | Answer) -> bytes:
    """The header of a message."""
    return _encoder.encode(message)


def decode_call(header: bytes | memoryview) -> Call:
    """The call of a header.

    Raises:
        KVStoreError: it is none, or too long for one.
    """
    # Before it is decoded: nests and lists in it take many times their bytes.
    if len(header) > MOST_HEADER_BYTES:
        raise KVStoreError(
            f"wanted a call of a worker in at most {MOST_HEADER_BYTES} bytes, got {len(header)}"
        )
    call = _decoded(_calls, header, "a call of a worker")
    if (shape := getattr(call.body, "shape", None)) is not None:
        check_shape(shape)
    if isinstance(call.body, Init | Know | Push | PushRows | Pull | Enter):
        check_key(call.body.slot.key)
    return call


def decode_answer(header: bytes | memoryview) -> Answer:
    """The answer of a header.

    Raises:
        KVStoreError: it is none.
    """
    answer = _decoded(_answers, header, "an answer of a server")
    if answer.shape is not None:
        check_shape(answer.shape)
    return answer


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", header: bytes | memoryview, what: str) -> T:
    try:
        return decoder.decode(header)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise KVStoreError(f"wanted {what}, got {error}") from error


def check_shape(shape: Shape) -> None:
    """Refuse what no frame can hold, before memory is taken for it.

    Raises:
        KVStoreError: an unknown type, a negative size, or too much.
    """
    is_known = shape.dtype in DTYPES and len(shape.sizes) <= MOST_DIMS
    # Each in turn, since the size of an unknown type cannot be asked.
    if not is_known or any(size < 0 for size in shape.sizes) or shape.num_bytes() > MOST_BYTES:
        raise KVStoreError(
            f"wanted a tensor of at most {MOST_BYTES} bytes and a known type, got {shape.dtype[:32]} "
            f"{list(shape.sizes[:MOST_DIMS])}"
        )


def check_key(key: Key) -> None:
    """Refuse keys that servers do not take.

    Raises:
        KVStoreError: a name too long, or with a character that UTF-8 does not have, or a number of more than
            64 bits.
    """
    if isinstance(key, int):
        if not -(1 << 63) <= key < 1 << 63:
            raise KVStoreError(f"wanted keys of at most 64 bits, got one of {key.bit_length()}")
        return
    try:
        num_bytes = len(key.encode())
    except UnicodeEncodeError as error:
        raise KVStoreError(
            f"wanted keys that can be written in UTF-8, got {key[:32]!a}, whose character {error.start} "
            f"cannot ({error.reason}); name it otherwise"
        ) from error
    if num_bytes > MOST_KEY_BYTES:
        raise KVStoreError(
            f"wanted keys of at most {MOST_KEY_BYTES} bytes, got {len(key)} characters: {key[:32]!r}..."
        )


def check_type(key: Key, dtype: torch.dtype) -> None:
    """Refuse a value of a type that servers do not keep, say of complex numbers.

    Raises:
        KVStoreError: names the key, and which types there are.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise KVStoreError(
            f"wanted a type that servers keep for key {key!r} in init ({', '.join(DTYPES)}), got {name}; "
            "give torch.view_as_real of complex numbers, or take the kind 'dist_sync'"
        )


def shape_of(tensor: Tensor) -> Shape:
    """What a frame of a tensor holds."""
    return Shape(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def frame_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, not copied."""
    if not tensor.numel():
        return memoryview(b"")
    # As bytes: NumPy has no bfloat16.
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data


def tensor_of(frame: memoryview, shape: Shape) -> Tensor:
    """The tensor in a frame, not copied.

    Raises:
        KVStoreError: it has another number of bytes than the shape.
    """
    if len(frame) != shape.num_bytes():
        raise KVStoreError(
            f"wanted {shape.num_bytes()} bytes of {shape.dtype} {list(shape.sizes)}, got {len(frame)}"
        )
    dtype = DTYPES[shape.dtype]
    if not len(frame):
        return torch.empty(shape.sizes, dtype=dtype, device="cpu")
    return torch.frombuffer(frame, dtype=dtype).view(shape.sizes)


def tensors_of(frames: Sequence[memoryview], shapes: Sequence[Shape]) -> list[Tensor]:
    """The tensors in frames.

    Raises:
        KVStoreError: another number of frames, or of bytes in one.
    """
    if len(frames) != len(shapes):
        raise KVStoreError(f"wanted {len(shapes)} frames, got {len(frames)}")
    return [tensor_of(frame, shape) for frame, shape in zip(frames, shapes, strict=True)]
