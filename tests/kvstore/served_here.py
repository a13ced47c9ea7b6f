"""Servers in threads of a test, connections to them, and keys."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq

from ridgeline.runtime.kvstore.serving.addressing.keys import (
    Keys,
    make_keys,
    read_keys,
)
from ridgeline.runtime.kvstore.serving.server.server import Server
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots
from ridgeline.runtime.kvstore.serving.worker.channel import Connection


@contextmanager
def serving(
    shard: Shard,
    lease_s: float = 60.0,
    keys: Keys | None = None,
    address: str = "tcp://127.0.0.1:*",
    snapshots: Snapshots | None = None,
) -> Iterator[Server]:
    """A server in a thread."""
    server = Server(shard, address, lease_s, keys, snapshots)
    ends = threading.Event()
    thread = threading.Thread(target=server.serve, args=(ends.is_set,))
    thread.start()
    try:
        yield server
    finally:
        ends.set()
        thread.join()
        server.close()


@contextmanager
def connected(address: str, number: int = 1, **settings: Any) -> Iterator[Connection]:
    """A connection of worker 0, which may have others of other numbers."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = Connection(context, address, 0, number, **settings)
    try:
        yield channel
    finally:
        channel.close()
        context.destroy(linger=0)


def new_keys(directory: Path) -> tuple[Keys, Keys]:
    """Of a server and of workers."""
    make_keys(directory)
    return read_keys(str(directory), "server"), read_keys(str(directory), "worker")


def until(is_true: Callable[[], bool], ask: Callable[[], object]) -> None:
    """Ask for something again and again until it has led to something; the test's guard ends it otherwise."""
    while not is_true():
        ask()
