"""Stores with servers: several workers push and pull as they like, and lose nothing when one is gone."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import store_worker
import torch
import zmq
from torch import Tensor

import ridgeline as rl
from asked_workers import Workers
from ridgeline.errors import EngineError, KVStoreError
from ridgeline.runtime.kvstore import KVStore
from ridgeline.runtime.kvstore.compression import Compression
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.channel import Asked, Channel
from ridgeline.runtime.kvstore.serving.remote import RemoteShelf
from ridgeline.runtime.kvstore.serving.server import Server
from ridgeline.runtime.kvstore.serving.shard import Shard


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(store_worker.__file__)) as started:
        yield started


@contextmanager
def serving(shard: Shard, lease_s: float = 60.0) -> Iterator[Server]:
    """A server in a thread."""
    server = Server(shard, "tcp://127.0.0.1:*", lease_s)
    ends = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ends.is_set,))
    thread.start()
    try:
        yield server
    finally:
        ends.set()
        thread.join()
        server.close()


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("staleness", [None, 0, 2])
def test_pushes_of_all_count_once(
    workers: Workers, staleness: int | None, servers: int, tmp_path: Path
) -> None:
    """Whole and divided values, sparse rows, bits, and state through a file."""
    path = str(tmp_path / "states")
    told = workers.ask("served", 4, staleness=staleness, servers=servers, path=path)
    value = store_worker.values_of(0, 7, [store_worker.ROWS, store_worker.WIDTH], "float32")
    plain = value - 3 * 10
    rows = sum(store_worker.rows_of(rank, 0).to_dense() for rank in range(4))
    assert isinstance(rows, Tensor)
    codec = Compression({"type": "2bit", "threshold": 2.0})
    sent = sum(codec.passed(rank, torch.full_like(value, rank + 1.0)) for rank in range(4))
    for one in told:
        assert one["begun"] == [value.double().tolist(), 5.0, []]
        close(one["summed"][0], plain)
        assert one["summed"][1] == 5.0 - 30.0
        close(one["found"], plain - rows)
        close(one["coded"], plain - rows - sent)


def close(found: object, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), wanted, atol=1e-4, rtol=0, check_dtype=False)


def test_waiting_for_all_is_synchronous(workers: Workers) -> None:
    """With staleness=0 training is that of one process, bit for bit."""
    told = workers.ask("served_training", 4)
    torch.manual_seed(0)
    model = store_worker.Net()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(store_worker.STEPS):
        brought = [store_worker.gradients(model, rank, step) for rank in range(4)]
        for number, parameter in enumerate(model.parameters()):
            total = brought[0][number]
            for one in brought[1:]:
                total = total + one[number]
            parameter.grad = total * (1 / 4)
        plain.step()
    for number, parameter in enumerate(model.parameters()):
        wanted = parameter.detach().double().tolist()
        assert all(one["parameters"][number] == wanted for one in told)


def test_a_worker_alone_has_a_server(tmp_path: Path) -> None:
    """An updater that it does not know is refused, one of a module that it imports is not."""
    with rl.kvstore.create("dist_async") as store:
        store.init("w", torch.zeros(2))
        with pytest.raises(EngineError, match="call set_optimizer"):
            push_and_pull(store)
    with pytest.raises(KVStoreError, match=r"^wanted servers from 1 to 1, one a worker, got 3$"):
        rl.kvstore.create("dist_async", servers=3)
    with pytest.raises(
        KVStoreError, match=r"^wanted staleness as a number from 0 on, or None, got -1$"
    ):
        rl.kvstore.create("dist_async", staleness=-1)
    with pytest.raises(
        KVStoreError, match=r"^wanted staleness, servers and server_module for 'dist_async'"
    ):
        rl.kvstore.create("local", staleness=1)


def push_and_pull(store: KVStore) -> Tensor:
    store.push("w", torch.ones(2))
    return store.pull("w").get()


def test_a_worker_that_is_silent_is_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """Its lease ends, and those who waited go on; the log says so."""
    shard = Shard(2, 0)
    with serving(shard, lease_s=0.5) as server:
        silent = RemoteShelf([server.address], 1, 2, lease_s=1000.0)
        shelf = RemoteShelf([server.address], 0, 2, lease_s=0.5)
        with caplog.at_level(logging.WARNING):
            shelf.init({"w": torch.zeros(2)})
            silent.init({"w": torch.zeros(2)})
            shelf.push({"w": torch.ones(2)})
            out = torch.empty(2)
            shelf.read("w", [out], None)
        assert torch.equal(out, torch.ones(2))
        assert "worker 1 was not heard of for 0.5 s: nobody waits for it" in caplog.text
        shelf.close()
        silent.close()


GARBAGE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "noise": [bytes(range(256))],
    "a call that is cut": [wire.encode(wire.Call(0, 9, 1, wire.Beat()))[:-1]],
    "a huge tensor": [
        wire.encode(
            wire.Call(0, 9, 1, wire.Init(wire.Slot("x", 0), wire.Shape("float32", (1 << 50,))))
        )
    ],
}


def test_garbage_of_one_client_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log for each message; a worker beside it goes on."""
    shard = Shard(1, None)
    with serving(shard) as server, zmq.Context() as context, caplog.at_level(logging.WARNING):
        with context.socket(zmq.DEALER) as socket:
            socket.connect(server.address)
            shelf = RemoteShelf([server.address], 0, 1)
            shelf.init({"w": torch.zeros(2)})
            for frames in GARBAGE.values():
                socket.send_multipart(frames)
            out = torch.empty(2)
            while caplog.text.count("a message that is none was dropped") < len(GARBAGE):
                shelf.read("w", [out], None)
            socket.close(linger=0)
        shelf.close()
    assert not shard.slots.knows(wire.Slot("x", 0))


def test_a_server_that_says_nothing_is_named() -> None:
    """With its address, once it has been silent for long enough."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind("tcp://127.0.0.1:*")
        address = deaf.getsockopt_string(zmq.LAST_ENDPOINT)
        channel = Channel(context, address, 0, 1, silence_s=0.3)
        with pytest.raises(
            KVStoreError, match=rf"^wanted an answer of the server at {address}, got none"
        ):
            channel.ask(wire.Beat())
        channel.close()
        deaf.close(linger=0)


def test_what_is_lost_is_sent_again() -> None:
    """A server that forgets two of three messages: each call is done once all the same."""
    with serving(forgetful(Shard(1, None))) as server, zmq.Context() as context:
        channel = Channel(context, server.address, 0, 1, resend_s=0.02)
        shape = wire.Shape("float32", (1,))
        slot = wire.Slot("w", 0)
        channel.ask(wire.Init(slot, shape), torch.zeros(1))
        channel.ask(wire.SetOptimizer("sgd", 1.0, {"lr": 1.0}))
        pushes = [Asked(wire.Push(slot, shape), (torch.ones(1),))] * 40
        channel.finish(channel.start(pushes))
        answered = channel.ask(wire.Pull(slot))
        assert answered.answer.versions == {0: 40}
        assert answered.tensor == torch.tensor([-40.0])
        channel.close()


def forgetful(shard: Shard) -> Shard:
    """One that loses calls before it has seen them, and answers."""
    handle: Callable[..., list] = shard.handle
    count = iter(range(10**9))

    def sometimes(call: wire.Call, frames: list[memoryview]) -> list:
        number = next(count)
        if number % 3 == 1:
            return []
        replies = handle(call, frames)
        return [] if number % 3 == 2 else replies

    shard.handle = sometimes  # type: ignore[method-assign]
    return shard
