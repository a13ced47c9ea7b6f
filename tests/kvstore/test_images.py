"""What a server writes down, and what another one makes of it."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import Claim, FoundServer, Notice
from ridgeline.runtime.kvstore.serving.server import images
from ridgeline.runtime.kvstore.serving.server.images import image_of, restore
from ridgeline.runtime.kvstore.serving.server.server import Server
from ridgeline.runtime.kvstore.serving.server.shard import Sender, Shard
from ridgeline.runtime.kvstore.serving.server.snapshots import Snapshots
from ridgeline.runtime.kvstore.serving.wire import Answer, Call, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.peer import Peer
from ridgeline.runtime.kvstore.updaters import SetOptimizer


def test_snapshots_hold_all_of_a_shard(tmp_path: Path) -> None:
    """Values, momenta, settings, versions, and pushes that wait for their round, dense and sparse."""
    shard = Shard(2, 0)
    slot = ValueSlot("w", 0)
    shape = wire.Shape("float32", (3, 2))
    ones = [wire.frame_of(torch.ones(3, 2))]
    rows = wire.PushRows(slot, wire.Shape("float32", (1, 2)))
    some = [wire.frame_of(torch.tensor([1])), wire.frame_of(torch.ones(1, 2))]
    shard.handle(Call(0, 0, 1, wire.Init(slot, shape)), [wire.frame_of(torch.zeros(3, 2))])
    shard.handle(Call(0, 0, 2, SetOptimizer("sgd", 0.5, {"lr": 1.0, "momentum": 0.9})), [])
    for worker, number in ((0, 3), (1, 1)):
        shard.handle(Call(worker, 0, number, wire.Push(slot, shape)), ones)
    shard.handle(Call(0, 0, 4, wire.Push(slot, shape)), ones)
    shard.handle(Call(0, 0, 5, rows), some)
    images.write_image(image_of(shard, 7), tmp_path / "one.safetensors")
    image = images.read_image(tmp_path / "one.safetensors")
    again = Shard(2, 0)
    restore(again, image)
    assert image.number == 7
    assert again.awaits == {0, 1}
    assert [*tmp_path.iterdir()] == [tmp_path / "one.safetensors"]
    for one in (shard, again):
        one.awaits = set()
        for number in (1, 2):
            one.handle(Call(1, 9, number, wire.Push(slot, shape)), ones)
    for found, wanted in zip(
        again.slots.pull(slot, None), shard.slots.pull(slot, None), strict=True
    ):
        assert (
            torch.equal(found, wanted)
            if isinstance(found, Tensor)
            else found == wanted == {0: 3, 1: 3}
        )


def test_a_snapshot_of_another_kind_is_refused(tmp_path: Path) -> None:
    """One of a server with another staleness, or a file that is none."""
    image = image_of(Shard(1, 0), 1)
    with pytest.raises(
        KVStoreError,
        match=r"^wanted a snapshot of a server with staleness None, got one of 0; name another folder$",
    ):
        restore(Shard(1, None), image)
    (tmp_path / "none.safetensors").write_bytes(b"x" * 64)
    with pytest.raises(
        KVStoreError, match=r"^wanted a snapshot of a server in .*, got SafetensorErr"
    ):
        images.read_image(tmp_path / "none.safetensors")


def test_a_server_that_was_replaced_writes_nothing_that_counts(tmp_path: Path) -> None:
    """It may still live: what it writes is not what the next one begins with, and it says so."""
    old = Snapshots(tmp_path, Shard(1, None))
    shard = Shard(1, None)
    new = Snapshots(tmp_path, shard)
    assert (old.epoch, new.epoch) == (1, 2)
    assert shard.awaits == {0}
    new.want()
    new.turn()
    new.close(writes=True)
    old.want()
    old.turn()
    old.close(writes=True)
    assert (new.durable, new.failed) == (1, "")
    assert (old.durable, old.is_superseded) == (0, True)
    assert old.failed == (
        f"wanted to be the only server that writes snapshots to {tmp_path}, got another one that has taken the "
        "place of this one"
    )
    last = Snapshots(tmp_path, Shard(1, None))
    assert (last.epoch, last.begun) == (3, 1)
    last.close(writes=False)


def test_what_waited_for_workers_is_answered_once_it_is_written(tmp_path: Path) -> None:
    """A server that dies before would have told of settings that the next one does not know."""
    Snapshots(tmp_path, Shard(1, None)).close(writes=False)
    shard = Shard(1, None)
    snapshots = Snapshots(tmp_path, shard)
    shard.actions.do(0, SetOptimizer("sgd", 1.0, {"lr": 1.0}), ())
    call = Call(0, 1, 1, SetOptimizer("sgd", 1.0, {"lr": 10.0}), epoch=2)
    whole = Call(0, 2, 1, wire.Whole(), epoch=2)
    with closing(Server(shard, "tcp://127.0.0.1:*", snapshots=snapshots)) as server:
        (parked,) = server._held_back(shard.handle(call, []), call)
        told = server._held_back(shard.handle(whole, []), whole)
        waiting = [*server._until_written]
    assert parked.answer.is_parked
    assert [(reply.to.channel, reply.answer.is_parked) for reply in told] == [(2, False), (1, True)]
    assert waiting == [(Sender(0, 1), 1)]


def test_snapshots_that_cannot_be_written_are_told_of(tmp_path: Path) -> None:
    """And tried again; what is not written is not durable."""
    snapshots = Snapshots(tmp_path / "here", Shard(1, None))
    (tmp_path / "here").rename(tmp_path / "there")
    snapshots.want()
    snapshots.turn()
    snapshots.close(writes=False)
    assert (snapshots.begun, snapshots.durable) == (1, 0)
    assert snapshots.failed.startswith(f"wanted to write a snapshot to {tmp_path / 'here'}, got ")


def test_each_epoch_is_of_one_server(tmp_path: Path) -> None:
    """And workers are told of the newest alone, whoever is the last to tell."""
    assert [Claim(tmp_path).epoch for _ in range(3)] == [1, 2, 3]
    notice = Notice(torch.distributed.HashStore())
    assert notice.newest(0) is None
    assert notice.publish(0, FoundServer(3, "c"))
    assert not notice.publish(0, FoundServer(2, "b"))
    assert notice.newest(0) == FoundServer(3, "c")
    assert notice.publish(0, FoundServer(4, "d"))
    assert notice.newest(0) == FoundServer(4, "d")
    assert notice.newest(1) is None


def test_a_worker_keeps_what_is_not_written() -> None:
    """As much as it may; a server that writes nothing makes it keep nothing."""
    peer, slot, shape = Peer(FoundServer(1, "")), ValueSlot("w", 0), wire.Shape("float32", (4,))
    peer.least_bytes = 20
    pushes = [peer.numbered(wire.Push(slot, shape)) for _ in range(3)]
    assert [push.number for push in pushes if isinstance(push, wire.Push)] == [1, 2, 3]
    for push in pushes[:2]:
        peer.sent(push, (torch.zeros(4),))
    assert peer.is_full
    peer.answered(0, pushes[0], Answer(1, begun=1, durable=1))
    peer.answered(0, pushes[1], Answer(2, begun=2, durable=1))
    assert peer.is_full
    peer.answered(0, wire.Beat(), Answer(3, begun=2, durable=2))
    assert not peer.is_full
    there = Peer(FoundServer(1, ""))
    there.sent(pushes[0], (torch.zeros(400),))
    there.least_bytes = 20
    assert there.is_full
    there.answered(0, pushes[0], Answer(1))
    assert not there.is_full
