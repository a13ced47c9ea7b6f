"""Messages of an asynchronous store: what is sent arrives, and what is none is refused before anything is done."""

import contextlib

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.wire import Answer, Call, Shape, ValueSlot
from ridgeline.runtime.kvstore.updaters import SetOptimizer

SLOTS = st.builds(
    ValueSlot, st.one_of(st.integers(0, 1 << 40), st.text(max_size=20)), st.integers(0, 99)
)
SHAPES = st.builds(
    Shape,
    st.sampled_from([*wire.DTYPES]),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
)
BODIES = st.one_of(
    st.builds(wire.Init, SLOTS, SHAPES),
    st.builds(wire.Know, SLOTS, SHAPES),
    st.builds(wire.Push, SLOTS, SHAPES, st.one_of(st.none(), st.just({"type": "2bit"}))),
    st.builds(wire.PushRows, SLOTS, SHAPES),
    st.builds(wire.Pull, SLOTS, st.one_of(st.none(), st.integers(0, 99))),
    st.builds(SetOptimizer, st.text(max_size=9), st.just(0.5), st.just({"lr": 0.1})),
    st.builds(wire.SetUpdater, st.text(max_size=9)),
    st.builds(wire.States),
    st.builds(wire.LoadStates, st.integers(0, 99)),
    st.builds(wire.Barrier),
    st.builds(wire.Share, st.text(max_size=50), st.text(max_size=90)),
    st.builds(wire.Beat),
    st.builds(wire.Join),
    st.builds(wire.Enter, SLOTS, st.integers(0, 99)),
    st.builds(wire.Leave),
)
CALLS = st.builds(Call, st.integers(0, 9), st.integers(0, 9), st.integers(1, 99), BODIES)


@given(call=CALLS)
def test_calls_arrive(call: Call) -> None:
    """As they were sent."""
    assert wire.decode_call(wire.encode(call)) == call


@given(shape=SHAPES, seed=st.integers(0, 99))
def test_tensors_arrive(shape: Shape, seed: int) -> None:
    """Their bits, whatever they are and however they lie; empty ones, too."""
    raw = torch.randint(
        0, 2, (shape.num_bytes(),), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
    )
    frame = memoryview(bytearray(raw.numpy().tobytes()))
    tensor = wire.tensor_of(frame, shape)
    assert wire.shape_of(tensor) == shape
    assert bytes(wire.frame_of(tensor)) == bytes(frame)
    assert bytes(wire.frame_of(tensor.t() if tensor.ndim == 2 else tensor)) is not None
    with pytest.raises(KVStoreError, match=r"^wanted \d+ bytes of .*, got \d+$"):
        wire.tensor_of(memoryview(bytes(frame) + b"\0"), shape)


@settings(max_examples=3000)
@given(header=st.binary(max_size=60))
def test_garbage_is_refused(header: bytes) -> None:
    """By one error, whatever the bytes are."""
    for decode in (wire.decode_call, wire.decode_answer):
        with contextlib.suppress(KVStoreError):
            decode(header)


@settings(max_examples=1000)
@given(call=CALLS, place=st.integers(0, 1 << 16), value=st.integers(0, 255), cut=st.integers(0, 20))
def test_damaged_calls_are_calls_or_refused(call: Call, place: int, value: int, cut: int) -> None:
    """A byte that is another, or an end that is missing."""
    header = bytearray(wire.encode(call))
    header[place % len(header)] = value
    with contextlib.suppress(KVStoreError):
        wire.decode_call(bytes(header[: len(header) - cut]))


@pytest.mark.parametrize(
    ("shape", "got"),
    [
        (Shape("float32", (1 << 40,)), "float32 [1099511627776]"),
        (Shape("float32", (1 << 40, 0, -1)), "float32 [1099511627776, 0, -1]"),
        (Shape("object", (1,)), "object [1]"),
        (Shape("float32", (1,) * 17), "float32 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"),
    ],
)
def test_shapes_that_nobody_holds_are_refused(shape: Shape, got: str) -> None:
    """Before memory is taken for them."""
    call = Call(0, 0, 1, wire.Push(ValueSlot("w", 0), shape))
    with pytest.raises(KVStoreError) as refused:
        wire.decode_call(wire.encode(call))
    assert str(refused.value) == (
        f"wanted a tensor of at most 1073741824 bytes and a known type, got {got}"
    )
    with pytest.raises(KVStoreError):
        wire.decode_answer(wire.encode(Answer(1, shape=shape)))


def test_nothing_in_a_message_is_code() -> None:
    """Fields that are unknown, and kinds that are, are refused."""
    header = msgspec.msgpack.encode([0, 0, 1, ["eval", "print(1)"]])
    with pytest.raises(KVStoreError, match=r"^wanted a call of a worker, got Invalid value 'eval'"):
        wire.decode_call(header)
