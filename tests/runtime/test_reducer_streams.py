"""Which stream a bucket leaves from, in a model of streams that knows what comes after what."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from stream_model import Streams
from torch import Tensor, nn

from ridgeline.capture import ready
from ridgeline.engine import Engine
from ridgeline.engine.lanes.streams import StreamLane
from ridgeline.errors import CaptureError
from ridgeline.plan import Sync
from ridgeline.recording.clocks import HostClock
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.buckets.departures import Departures
from ridgeline.runtime.sync.buckets.flags import UnusedParameters
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.transports.all_reduce import AllReduce
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World


class Marking(Recorder):
    """Marks are work on the current stream, as events that a graph records are."""

    def __init__(self, streams: Streams) -> None:
        super().__init__(HostClock())
        self.streams = streams

    def mark(self, name: str, lane: Any = "compute") -> None:
        self.streams.current.enqueue(f"mark {name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """torch.cuda as far as the reducer uses it; gradients are ready where `side` made them."""
    model = Streams()
    for name, stand_in in {
        "Stream": model.make,
        "stream": model.use,
        "current_stream": lambda *_: model.current,
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    store_all = Bucket.store_all

    def stored(bucket: Bucket, missing: tuple[int, ...]) -> None:
        store_all(bucket, missing)
        model.current.enqueue(f"store {bucket.index}")

    monkeypatch.setattr(Bucket, "store_all", stored)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: model.current.enqueue("all-reduce"))
    monkeypatch.setattr(dist, "broadcast", lambda *_, **__: None)
    monkeypatch.setattr(World, "group", lambda *_: None)
    make = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, *, dtype, device: make(data, dtype=dtype))
    return model


def run(
    streams: Streams, told: dict[str, ready.Ready], limits: tuple[int, ...], *, after: bool = False
) -> Reducer:
    """One backward pass of four layers, whose gradients all arrive when `backward` is enqueued.

    Args:
        streams: Where.
        told: When gradients are ready, by name.
        limits: Bytes of buckets.
        after: There was one of another form before, whose gradients did not tell.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    stream: Any = streams.make("communication")
    engine = Engine(lanes={"communication": lambda finish: StreamLane(finish, stream)})
    world = World(0, 2, 0, torch.device("cuda", 0))
    reducer = Reducer(
        list(model.named_parameters()),
        FlatBuffers(model),
        world=world,
        engine=engine,
        sync=Sync(bucket_bytes=limits),
        transport=AllReduce(world, {}),
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def when(gradient: Tensor) -> ready.Ready | None:
        return told.get(next(names[id(p)] for p in model.parameters() if p.grad is gradient))

    original = ready.look_up
    try:
        if after:
            ready.look_up = lambda _: None
            reducer.arm(Marking(streams))
            model(torch.ones(1, 4)).sum().backward()
            reducer.finish()
            model.zero_grad()
            reducer.forget_order()
        ready.look_up = when
        reducer.arm(Marking(streams))
        loss = model(torch.ones(1, 4)).sum()
        streams.main.enqueue("backward")
        loss.backward()
        reducer.finish()
    finally:
        ready.look_up = original
        reducer.close()
        engine.close()
    streams.main.enqueue("optimizer")
    return reducer


def test_a_bucket_of_ready_gradients_does_not_wait_for_backward(streams: Streams) -> None:
    """It leaves after what it needs, and the optimizer comes after everything on every stream."""
    side = streams.make("side")
    told = {}
    for number, name in enumerate(("3.weight", "2.weight")):
        side.enqueue(name)
        event: Any = side.record_event()
        told[name] = ready.Ready(number, 0, event, 0, None)  # type: ignore[arg-type]
    streams.main.wait_stream(side)
    run(streams, told, (128,))
    backward, end = streams.work("backward"), streams.work("optimizer")
    first, second = (streams.before(streams.work(f"store {number}")) for number in (0, 1))
    assert {streams.work("3.weight"), streams.work("2.weight")} <= first
    assert backward not in first
    assert backward in second, "the others do not tell"
    sent = [work for work in streams.after if work[0] == "all-reduce"]
    assert backward not in streams.before(sent[0])
    everything = {stream.last for stream in streams.made if stream.last is not None}
    assert everything <= streams.before(end), "a capture must end with every stream joined"


def test_a_bucket_with_one_gradient_that_does_not_tell_waits_for_all(streams: Streams) -> None:
    """It would have to be ready somewhere else."""
    side = streams.make("side")
    side.enqueue("3.weight")
    event: Any = side.record_event()
    streams.main.wait_stream(side)
    told = {"3.weight": ready.Ready(0, 0, event, 0, None)}  # type: ignore[arg-type]
    run(streams, told, (128,))
    backward = streams.work("backward")
    assert all(backward in streams.before(streams.work(f"store {number}")) for number in (0, 1))


def test_in_a_capture_copying_does_not_hold_up_backward(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets are filled beside what is left of backward; behind the last one nothing is left."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(UnusedParameters, "settle", lambda *_: None)
    run(streams, {}, (64,))
    backward, end = streams.work("backward"), streams.work("optimizer")
    stores = [streams.work(f"store {number}") for number in range(4)]
    assert all(backward in streams.before(store) for store in stores)
    streams_of = {work: s.name for s in streams.made for work in s.own}
    assert [streams_of[store] == "main" for store in stores] == [False, False, False, True]
    everything = {stream.last for stream in streams.made if stream.last is not None}
    assert everything <= streams.before(end)


def test_a_capture_in_another_order_is_refused(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient in the place of another parameter would be overwritten by that one's."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    departures = Departures(torch.device("cuda", 0))
    flat = torch.zeros(8)
    departures.begin({0: flat[:4], 1: flat[4:]})
    assert departures.arrive(0, flat[:4], flat[:4]) is None
    assert departures.arrive(1, torch.ones(4), flat[4:]) is None
    with pytest.raises(CaptureError, match="wanted the captured step to compute its gradients in"):
        departures.arrive(1, flat[:4], flat[4:])
    departures.end()


@pytest.mark.parametrize("after", [False, True])
def test_gradients_that_tell_come_first(streams: Streams, after: bool) -> None:
    """In the order in which they are ready, whatever the order in which a program hands them out."""
    event: Any = streams.make("side").record_event()
    told = {
        name: ready.Ready(number, 0, event, 0, None)  # type: ignore[arg-type]
        for number, name in enumerate(("0.weight", "2.weight"))
    }
    reducer = run(streams, told, (64,), after=after)
    assert [name for bucket in reducer.buckets for name in bucket.names] == [
        "0.weight",
        "2.weight",
        "3.weight",
        "1.weight",
    ]
