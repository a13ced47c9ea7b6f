"""Clients that replay, flood, or send what is none or too much: refused, told so, and nobody else is stopped."""

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
import zmq
from served_here import connected, new_keys, serving, until

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.joining.beside import ServerBeside
from ridgeline.runtime.kvstore.serving.server import server as servers
from ridgeline.runtime.kvstore.serving.server import shard as shards
from ridgeline.runtime.kvstore.serving.server import slots
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.slices import Asked
from ridgeline.runtime.kvstore.serving.wire import Call, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import OptimizerUpdater, SetOptimizer

OTHER = 99
"""Of a connection of a worker that has some already."""
FLOOD = 20_000
MOST_GROWTH_BYTES = 8 << 20
"""Of a server's memory in a flood, whose messages are more than that."""
UNREAD = 300
"""Answers of a mebibyte that nobody reads, of which a server keeps 64."""
MOST_UNREAD_BYTES = 100 << 20
PATTERN = 123.456


class Recorder:
    """Passes bytes on between a client and a server, and keeps those of the client.

    Attributes:
        address: For the client.
        sent: What it has sent.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        self.sent = bytearray()


@contextmanager
def recording(address: str) -> Iterator[Recorder]:
    """A recorder of one connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    recorder = Recorder(listener)
    ends = threading.Event()

    def pass_on() -> None:
        client, _ = listener.accept()
        # A client that is gone, with something unread maybe, has sent all that it sends.
        with client, plain_connection(address) as there, suppress(ConnectionError):
            while not ends.is_set():
                for one in select.select([client, there], [], [], 0.05)[0]:
                    data = one.recv(1 << 16)
                    if not data:
                        return
                    if one is client:
                        recorder.sent += data
                        there.sendall(data)
                    else:
                        client.sendall(data)

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield recorder
    finally:
        ends.set()
        thread.join()
        listener.close()


def plain_connection(address: str) -> socket.socket:
    """Without ZeroMQ."""
    return socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])))


def counting(address: str, **settings: object) -> RemoteShelf:
    """A worker with a value from which pushes are taken."""
    shelf = RemoteShelf([address], 0, 1, **settings)  # type: ignore[arg-type]
    shelf.init({"w": torch.zeros(4)})
    shelf.set_updater(OptimizerUpdater(SetOptimizer("sgd", 1.0, {"lr": 1.0})))
    return shelf


def goes_on(shelf: RemoteShelf) -> None:
    """A push of this worker counts, and nothing of others."""
    before, after = torch.empty(4), torch.empty(4)
    shelf.read("w", [before], None)
    shelf.push_and_read("w", torch.ones(4), [after])
    assert torch.equal(after, before - 1)


def test_a_recorded_connection_cannot_be_played_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The keys of a connection are its own; nor can it be read."""
    own, theirs = new_keys(tmp_path)
    shard = Shard(1, None)
    with serving(shard, keys=own) as server, caplog.at_level(logging.WARNING):
        beside = counting(server.address, keys=theirs)
        with (
            recording(server.address) as recorder,
            connected(recorder.address, OTHER, keys=theirs) as channel,
        ):
            shape = wire.Shape("float32", (4,))
            pushed = torch.full((4,), PATTERN)
            channel.ask(wire.Push(ValueSlot("w", 0), shape), pushed)
            assert channel.ask(wire.Pull(ValueSlot("w", 0))).answer.versions == {0: 1}
        assert len(recorder.sent) > 300
        assert bytes(wire.frame_of(pushed)) not in recorder.sent
        with plain_connection(server.address) as again:
            again.sendall(recorder.sent)
            until(lambda: bool(caplog.messages), lambda: goes_on_from(beside, -PATTERN))
        beside.close()
    assert caplog.messages[0].startswith("a connection was refused: ")


def goes_on_from(shelf: RemoteShelf, value: float) -> None:
    """Nothing has been pushed since."""
    out = torch.empty(4)
    shelf.read("w", [out], None)
    assert torch.equal(out, torch.full((4,), value))


GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
FRAMES = {
    "another mechanism": GREETING.replace(b"NULL", b"EVIL"),
    "a command that is none": GREETING + b"\x04\x05\xffEVIL",
    "a frame that never ends": GREETING + b"\x02" + struct.pack(">Q", 1 << 62),
}


@pytest.mark.parametrize("what", [*FRAMES])
def test_bytes_that_are_no_messages_end_their_connection(what: str) -> None:
    """Alone: others go on."""
    with serving(Shard(1, None)) as server:
        shelf = counting(server.address)
        with plain_connection(server.address) as raw:
            raw.sendall(FRAMES[what])
            until(lambda: is_closed(raw), lambda: goes_on(shelf))
        shelf.close()


def is_closed(raw: socket.socket) -> bool:
    """Whether the other end has closed a connection; what it has sent before is thrown away."""
    if not select.select([raw], [], [], 0)[0]:
        return False
    try:
        return not raw.recv(1 << 16)
    except ConnectionResetError:
        return True


def test_who_says_nothing_of_itself_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Once it has ended its connection."""
    with serving(Shard(1, None)) as server, caplog.at_level(logging.WARNING):
        shelf = counting(server.address)
        with plain_connection(server.address) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: bool(caplog.messages), lambda: goes_on(shelf))
        shelf.close()
    told = "a connection was refused: it ended before it had identified itself"
    assert caplog.messages == [told]


def test_a_message_too_large_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection ends, and others go on; who has such a value is told before it is sent."""
    monkeypatch.setattr(wire, "MOST_BYTES", 1 << 20)
    with serving(Shard(1, None)) as server, zmq.Context() as context:
        shelf = counting(server.address)
        with context.socket(zmq.DEALER) as large:
            monitor = large.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            large.connect(server.address)
            large.send_multipart([wire.encode(Call(0, 9, 1, wire.Beat())), bytes((1 << 20) + 1)])
            until(lambda: bool(monitor.poll(0)), lambda: goes_on(shelf))
            large.disable_monitor()
            monitor.close()
            large.close(linger=0)
        with pytest.raises(KVStoreError) as refused:
            shelf.init({"v": torch.zeros(1, 1 << 19)})
        assert str(refused.value) == (
            "wanted a tensor of at most 1048576 bytes and a known type, got float32 [1, 524288]"
        )
        goes_on(shelf)
        shelf.close()


def test_what_a_worker_may_name_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, the slices of a server, connections, calls, and calls that wait; each refused on its client."""
    for module, name, limit in (
        (slots, "MOST_SLICES", 2),
        (servers, "MOST_CONNECTIONS", 3),
        (shards, "MOST_PARKED", 2),
    ):
        monkeypatch.setattr(module, name, limit)
    with serving(Shard(2, None)) as server:
        shelf = counting(server.address)
        with pytest.raises(KVStoreError) as refused:
            shelf.init({"k" * 1025: torch.zeros(1)})
        assert str(refused.value) == (
            f"wanted keys of at most 1024 bytes, got 1025 characters: '{'k' * 32}'..."
        )
        with pytest.raises(KVStoreError, match=r"^wanted keys of at most 64 bits, got one of 64$"):
            shelf.init({1 << 63: torch.zeros(1)})
        with pytest.raises(
            KVStoreError, match=r"^wanted keys that can be written in UTF-8, got 'f\\udcff', whose"
        ):
            shelf.init({os.fsdecode(b"f\xff"): torch.zeros(1)})
        with pytest.raises(KVStoreError, match=r"^wanted a type that servers keep for key 'c' in"):
            shelf.init({"c": torch.zeros(1, dtype=torch.complex64)})
        shelf.init({"v": torch.zeros(1)})
        with pytest.raises(KVStoreError) as refused:
            shelf.init({"u": torch.zeros(1)})
        assert str(refused.value) == (
            "wanted at most 2 slices of values on a server, got another one, of key 'u'; have more servers, "
            "or fewer keys"
        )
        with connected(server.address, OTHER) as channel:
            with pytest.raises(
                KVStoreError, match=r"^wanted a key with a value, got 'x'; call init"
            ):
                channel.ask(
                    wire.Push(ValueSlot("x", 0), wire.Shape("float32", (1,))), torch.zeros(1)
                )
            know = Asked(wire.Know(ValueSlot("x", 0), wire.Shape("float32", (1,))))
            with pytest.raises(KVStoreError) as refused:
                channel.finish(channel.start([know, know, know])[2:])
            assert str(refused.value) == (
                "wanted at most 2 calls of a connection that wait for other workers, got another one"
            )
        goes_on(shelf)
        shelf.close()


def test_a_server_answers_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections beyond what it remembers, and calls too long: an error comes at once."""
    monkeypatch.setattr(servers, "MOST_CONNECTIONS", 3)
    with serving(Shard(1, None)) as server:
        shelf = counting(server.address, lease_s=1e6)  # says only once that it is there
        with (
            connected(server.address, OTHER) as channel,
            pytest.raises(KVStoreError) as refused,
        ):
            channel.ask(wire.SetUpdater("x" * (1 << 16)))
        assert str(refused.value) == (
            f"the server at {server.address} refused a message: wanted a call of a worker in at most 65536 "
            "bytes, got 65562"
        )
        with connected(server.address, OTHER) as channel:
            channel.ask(wire.Beat())
        with (
            connected(server.address, OTHER + 1) as channel,
            pytest.raises(KVStoreError) as refused,
        ):
            channel.ask(wire.Beat())
        assert str(refused.value) == (
            f"the server at {server.address} refused a message: wanted at most 3 connections over the life "
            "of a server, got another one, of worker 0"
        )
        goes_on(shelf)
        shelf.close()


def test_a_flood_leaves_memory_flat_and_stops_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    """Of garbage, and of calls whose answers nobody reads; the log has two lines."""
    beside = ServerBeside(1, None, "")
    process = psutil.Process(beside._process.pid)
    shelf = counting(beside.address)
    shelf.init({"large": torch.zeros(1 << 18)})

    def growth_in(headers: list[bytes], every: int) -> int:
        before = process.memory_info().rss
        with zmq.Context() as context, context.socket(zmq.DEALER) as intruder:
            intruder.setsockopt(zmq.RCVHWM, 1)
            intruder.connect(beside.address)
            for number, header in enumerate(headers):
                intruder.send(header)
                if number % every == 0:
                    goes_on(shelf)
            growth = process.memory_info().rss - before
            intruder.close(linger=0)
        return growth

    garbage = [os.urandom(1000)] * FLOOD
    growth_in(garbage, every=100)
    assert growth_in(garbage, every=100) < MOST_GROWTH_BYTES
    pulls = (
        Call(0, OTHER, number, wire.Pull(ValueSlot("large", 0))) for number in range(1, UNREAD)
    )
    # Each is answered before the next: calls of several connections take turns.
    assert growth_in([*map(wire.encode, pulls)], every=1) < MOST_UNREAD_BYTES
    shelf.close()
    beside.close()
    lines = capfd.readouterr().err.splitlines()
    first, *rest = [line for line in lines if line.startswith("a malformed message")]
    assert "; it came from 127.0.0.1" in first
    assert all("more since the last line about this" in line for line in rest)
