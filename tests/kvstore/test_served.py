"""Stores with servers: several workers push and pull as they like, and lose nothing when one is gone."""

import logging
import math
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import store_worker
import torch
import zmq
from served_here import connected, serving, until
from torch import Tensor

import ridgeline as rl
from asked_workers import Workers
from ridgeline.errors import EngineError, KVStoreError
from ridgeline.runtime.kvstore import KVStore
from ridgeline.runtime.kvstore.compression import KeyedCompression
from ridgeline.runtime.kvstore.serving import segment, wire
from ridgeline.runtime.kvstore.serving.addressing.addresses import host_identity
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Sender, Shard
from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots
from ridgeline.runtime.kvstore.serving.slices import Asked
from ridgeline.runtime.kvstore.serving.worker import outages
from ridgeline.runtime.kvstore.serving.worker.channel import Connection
from ridgeline.runtime.kvstore.serving.worker.connections import Connections
from ridgeline.runtime.kvstore.serving.worker.peer import Peer
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import SetOptimizer


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One start for all that is asked here."""
    with Workers(Path(store_worker.__file__)) as started:
        yield started


@pytest.mark.parametrize(("staleness", "servers"), [(None, 0), (0, 2), (2, 1)])
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
    codec = KeyedCompression({"type": "2bit", "threshold": 2.0})
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
        KVStoreError,
        match=r"^wanted staleness, servers, server_module, address, keys, snapshots and join for 'd",
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
        assert (
            "worker 1 sent no message for 0.5 s: no worker waits for it any longer" in caplog.text
        )
        shelf.close()
        silent.close()


def test_a_server_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    """Its connection ends with it: the one that takes its place is looked for before an answer is late."""
    places = [FoundServer(1, ""), FoundServer(2, "")]
    for place in range(2):
        shard = Shard(1, None)
        snapshots = Snapshots(tmp_path, shard)
        with serving(shard, snapshots=snapshots) as server:
            places[place] = FoundServer(server.epoch, server.address)
            if not place:
                peer = Peer(places[0], lambda: places[1] if places[1].address else None)
                context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
                channel = Connection(context, peer, 0, 1, silence_s=20.0, resend_s=1000.0)
                channel.ask(wire.Beat())
            else:
                channel.ask(wire.Beat())
    assert peer.found == places[1]
    channel.close()
    context.destroy(linger=0)


def test_a_worker_that_comes_back_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """With the memory that it shares; the log says for how long it was silent."""
    with serving(Shard(1, None), lease_s=0.3) as server, caplog.at_level(logging.WARNING):
        with connected(server.address) as channel:
            slot, shape = wire.ValueSlot("w", 0), wire.Shape("float32", (20_000,))
            channel.ask(wire.Init(slot, shape), torch.zeros(20_000))
            until(lambda: "worker 0 sent no message" in caplog.text, lambda: None)
            pulled = Asked(wire.Pull(slot), room=80_000)
            (found,) = channel.finish(channel.start([pulled]))
        assert found.tensor is not None
        assert torch.equal(found.tensor, torch.zeros(20_000))
    assert re.fullmatch(r"worker 0 is back, after \d+\.\d s without a message", caplog.messages[1])


class Deaf(Shard):
    """Does not hear so many calls; None: any number.

    Attributes:
        beats: One for each time that a worker has said that it is there, heard or not.
    """

    def __init__(self, num_lost: int | None = 0) -> None:
        super().__init__(1, None)
        self.num_lost = num_lost
        self.beats = threading.Semaphore(0)

    def handle(self, call: wire.Call, frames: Sequence[memoryview]) -> list[Reply]:
        if isinstance(call.body, wire.Beat):
            self.beats.release()
        if self.num_lost is None:
            return []
        self.num_lost -= 1
        return super().handle(call, frames) if self.num_lost < 0 else []


def test_a_server_that_says_nothing_ends_no_lease_elsewhere() -> None:
    """A worker says to each server that it is there, whatever the others do."""
    deaf, hearing = Deaf(None), Deaf()
    with serving(deaf) as silent, serving(hearing) as server:
        connections = Connections([silent.address, server.address], 0, beat_s=0.05)
        for shard in (hearing, deaf, hearing):
            for _ in range(3):
                shard.beats.acquire()
        deaf.num_lost = 0
        connections.close()


def test_an_outage_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the worker, once it hears of the server again."""
    monkeypatch.setattr(outages, "OUTAGE_S", 0.2)
    with (
        serving(Deaf(5)) as server,
        connected(server.address, resend_s=0.1) as channel,
        caplog.at_level(logging.WARNING),
    ):
        channel.ask(wire.Beat())
        # The call behind it is answered at once, but for a host that is busy.
        monkeypatch.setattr(outages, "OUTAGE_S", math.inf)
        channel.ask(wire.Beat())
    (told,) = caplog.messages
    assert re.fullmatch(
        rf"the server at {server.address} did not answer for \d\.\d s and answers again; worker 0 waited with 1 "
        "calls",
        told,
    )


GARBAGE: dict[str, list[bytes]] = {
    "nothing": [b""],
    "noise": [bytes(range(256))],
    "a call that is cut": [wire.encode(wire.Call(0, 9, 1, wire.Beat()))[:-1]],
    "a huge tensor": [
        wire.encode(
            wire.Call(0, 9, 1, wire.Init(wire.ValueSlot("x", 0), wire.Shape("float32", (1 << 50,))))
        )
    ],
}


def test_garbage_of_one_client_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It is answered with an error; the log has a line and a count; a worker beside it goes on."""
    shard = Shard(1, None)
    with serving(shard) as server, zmq.Context() as context, caplog.at_level(logging.WARNING):
        with context.socket(zmq.DEALER) as socket:
            socket.connect(server.address)
            shelf = RemoteShelf([server.address], 0, 1)
            shelf.init({"w": torch.zeros(2)})
            out = torch.empty(2)
            for frames in GARBAGE.values():
                socket.send_multipart(frames)
                shelf.read("w", [out], None)
                refused = wire.decode_answer(socket.recv())
                assert refused.number == 0
                assert refused.error.startswith("wanted a ")
            socket.close(linger=0)
        shelf.close()
    assert wire.ValueSlot("x", 0) not in shard.slots.slices
    first, last = (one for one in caplog.messages if one.startswith("a malformed message"))
    assert first.startswith("a malformed message was dropped: wanted a call of a worker, got ")
    assert first.endswith("; it came from 127.0.0.1")
    told = "a malformed message was dropped (3 more since the last line about this)"
    assert last == told


def test_a_server_that_says_nothing_is_named() -> None:
    """With its address, once it has been silent for long enough."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind("tcp://127.0.0.1:*")
        address = deaf.getsockopt_string(zmq.LAST_ENDPOINT)
        with (
            connected(address, silence_s=0.3) as channel,
            pytest.raises(
                KVStoreError, match=rf"^wanted an answer of the server at {address}, got none"
            ),
        ):
            channel.ask(wire.Beat())
        deaf.close(linger=0)


def test_workers_that_do_not_come_are_told_of() -> None:
    """Who waits for them says so, after a time; it is not the server that is silent."""
    with (
        serving(Shard(2, None)) as server,
        connected(server.address, resend_s=0.02, parked_s=0.2) as channel,
    ):
        message = (
            rf"^wanted other workers to come to what worker 0 waits for \(Barrier\) at {server.address}, "
            r"got none of worker 1 for \d+ s; make sure that all make the same calls of init and barrier, and push$"
        )
        with pytest.raises(KVStoreError, match=message):
            channel.ask(wire.Barrier())


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("numel", [1, 20_000])
def test_what_is_lost_is_sent_again(
    numel: int,
    is_shared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that forgets two of three messages: each call is done once all the same.

    Small tensors are sent, larger ones go through shared memory where there is some.
    """
    caplog.set_level(logging.INFO)
    # Not where others of this host share memory, whose files are there for a moment, too.
    monkeypatch.setattr(segment, "SHARED_FILES", tmp_path if is_shared else Path("/nowhere"))
    with (
        serving(forgetful(Shard(1, None))) as server,
        connected(server.address, resend_s=0.02) as channel,
    ):
        shape = wire.Shape("float32", (numel,))
        slot = wire.ValueSlot("w", 0)
        channel.ask(wire.Init(slot, shape), torch.zeros(numel))
        channel.ask(SetOptimizer("sgd", 1.0, {"lr": 1.0}))
        calls, taken = [], []
        for number in range(20):
            pushed = torch.full((numel,), float(number))
            calls.append(Asked(wire.Push(slot, shape), (pushed,)))
            calls.append(
                Asked(wire.Pull(slot), take=lambda t: taken.append(t.clone()), room=4 * numel)
            )
        channel.finish(channel.start(calls))
        sums = [-float(sum(range(number + 1))) for number in range(20)]
        for number, tensor in enumerate(taken):  # what is asked for again may see later pushes
            assert tensor[0].item() in sums[number:]
            assert (tensor == tensor[0]).all()
        assert len(taken) == 20
        answered = channel.ask(wire.Pull(slot))
        assert answered.answer.versions == {0: 20}
        assert answered.tensor is not None
        assert torch.equal(answered.tensor, torch.full((numel,), sums[-1]))
    says = "tensors go through sockets, since memory cannot be shared: "
    assert (says in caplog.text) == (numel > 1 and not is_shared)
    assert not [*tmp_path.iterdir()]


def test_who_wants_no_shared_memory_gets_none(monkeypatch, caplog) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("RIDGELINE_KVSTORE_SHARED", "0")
    with serving(Shard(1, None)) as server, connected(server.address) as channel:
        values = torch.arange(1e5)
        slot, shape = wire.ValueSlot("w", 0), wire.Shape("float32", (100_000,))
        channel.ask(wire.Init(slot, shape), values)
        found = channel.ask(wire.Pull(slot))
        assert torch.equal(found.tensor, values)
        assert not found.answer.is_shared
    assert (
        "sockets, since memory cannot be shared: RIDGELINE_KVSTORE_SHARED=0 in the" in caplog.text
    )


def test_places_in_memory_that_is_not_shared_are_refused() -> None:
    """Of a connection that shares none, beyond the end of what it shares, and names of other files."""
    with serving(Shard(1, None)) as server, connected(server.address) as channel:
        memory = segment.Segment.make(4096)
        assert not channel.ask(wire.Share(memory.name, "another")).answer.is_shared
        assert channel.ask(wire.Share(memory.name, host_identity())).answer.is_shared
        memory.forget_name()
        for place, length, room in ((4000, 97, 0), (0, 0, 4097), (-5, 8, 0), (0, -1, 0)):
            call = wire.Call(0, 1, 3, wire.Beat(), place, length, room)
            with pytest.raises(
                KVStoreError, match=r"^wanted bytes within 4096 of shared memory, got "
            ):
                server._shared(Sender(0, 1), call)
        with pytest.raises(
            KVStoreError, match=r"^wanted memory that this connection shares, got a"
        ):
            server._shared(Sender(0, 2), call)
        for name in ("../etc/passwd", "ridgeline-" + "0" * 31, "ridgeline-" + "0" * 32):
            with pytest.raises(KVStoreError, match=r"^wanted (the name of )?shared memory"):
                segment.Segment.open(name)


def test_an_empty_file_is_no_shared_memory() -> None:
    """A call that names one is refused like others, and ends no server."""
    path = segment.SHARED_FILES / f"ridgeline-{secrets.token_hex(16)}"
    path.touch()
    try:
        with pytest.raises(KVStoreError, match=rf"^wanted shared memory {path.name}, got "):
            segment.Segment.open(path.name)
    finally:
        path.unlink()


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
