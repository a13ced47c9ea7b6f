"""A server's slices and barriers where workers come later, or come back."""

import contextlib
import datetime
import signal
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from served_here import serving

from ridgeline.errors import KVStoreError
from ridgeline.runtime.kvstore.arguments import Held
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.addressing.keys import VARIABLE
from ridgeline.runtime.kvstore.serving.joining import beside, members
from ridgeline.runtime.kvstore.serving.joining.gathering import Wanted, gather_later
from ridgeline.runtime.kvstore.serving.joining.members import Members, StoreRecord, founded
from ridgeline.runtime.kvstore.serving.server.images import image_of, restore
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, Call, Shape, ValueSlot
from ridgeline.runtime.kvstore.serving.worker import remote
from ridgeline.runtime.kvstore.serving.worker.channel import Connection
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import register_updater
from ridgeline.runtime.kvstore.values.placement import ValuePart

SLOT, SHAPE = ValueSlot("w", 0), Shape("int64", (1,))


def add(key: Any, total: torch.Tensor, value: torch.Tensor) -> None:
    value.add_(total)


class Said:
    """A shard, and what workers say to it, each on one connection.

    Attributes:
        answers: By worker and number of the call; those that wait have none.
    """

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        register_updater("add for those who come later", add)
        self.shard = Shard(num_workers, staleness)
        self.answers: dict[tuple[int, int], Answer] = {}
        self._numbers: dict[int, int] = {}
        self.say(0, wire.Init(SLOT, SHAPE))
        self.say(0, wire.SetUpdater("add for those who come later"))

    def say(self, worker: int, body: Body) -> int:
        """The number of the call."""
        number = self._numbers[worker] = self._numbers.get(worker, 0) + 1
        frames = []
        if isinstance(body, wire.Init | wire.Push):
            brought = 10**worker if isinstance(body, wire.Push) else 0
            frames = [wire.frame_of(torch.tensor([brought]))]
        self.keep(self.shard.handle(Call(worker, 0, number, body), frames))
        return number

    def keep(self, replies: list) -> None:
        for one in replies:
            if not one.answer.is_parked:
                self.answers[one.to.worker, one.answer.number] = one.answer

    def versions(self, worker: int, body: Body) -> Mapping[int, int]:
        """Of an answer that is there at once."""
        return self.answers[worker, self.say(worker, body)].versions

    def is_answered(self, worker: int, number: int) -> bool:
        return (worker, number) in self.answers

    @property
    def held(self) -> tuple[int, dict[int, int]]:
        value, rounds = self.shard.slots.pull(SLOT, None)
        return int(value), rounds


PUSH, PULL, ENTER = wire.Push(SLOT, SHAPE), wire.Pull(SLOT), wire.Enter(SLOT)


@settings(max_examples=200)
@given(
    staleness=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=50),
)
def test_who_comes_later_is_as_far_as_the_slowest(
    staleness: int, steps: list[tuple[int, bool]]
) -> None:
    """From there on nobody is further ahead of anybody than s, and each push counts once."""
    said = Said(2, staleness)
    clocks, pushed, waits = {0: 0, 1: 0}, dict.fromkeys(range(4), 0), dict[int, int]()
    left = dict.fromkeys(range(4), 0)
    for worker, leaves in steps:
        if worker not in clocks:
            said.say(worker, wire.Join())
            clock = max(left[worker], min(clocks.values()))
            assert said.versions(worker, ENTER) == {worker: clock}
            clocks[worker] = clock
            waits.pop(worker, None)
        elif leaves and len(clocks) > 1:
            said.say(worker, wire.Leave())
            left[worker] = clocks.pop(worker)
        elif worker not in waits or said.is_answered(worker, waits[worker]):
            said.say(worker, PUSH)
            clocks[worker] += 1
            pushed[worker] += 1
            waits[worker] = said.say(worker, PULL)
            is_near = clocks[worker] - min(clocks.values()) <= staleness
            assert said.is_answered(worker, waits[worker]) == is_near
    assert said.held == (
        sum(10**one * n for one, n in pushed.items()),
        {one: n for one, n in pushed.items() if n},
    )


@settings(max_examples=200)
@given(
    before=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=12),
    between=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=12),
    times=st.integers(1, 4),
)
def test_rounds_of_all_parts_begin_alike(
    before: list[tuple[int, int]], between: list[tuple[int, int]], times: int
) -> None:
    """With s = 0 a worker joins the same round on two servers, however far each of them was."""
    parts = [Said(2, 0), Said(2, 0)]
    pushed = [[0, 0], [0, 0]]

    def push(part: int, worker: int) -> None:
        parts[part].say(worker, PUSH)
        pushed[part][worker] += 1

    for part, worker in before:
        push(part, worker)
    first = parts[0].versions(2, ENTER)[2]
    for part, worker in between:
        push(part, worker)
    clock = max(first, parts[1].versions(2, ENTER)[2])
    for part in parts:
        assert part.versions(2, wire.Enter(SLOT, clock)) == {2: clock}
    done = max(clock, *pushed[0], *pushed[1])
    for number, part in enumerate(parts):
        for worker in range(2):
            for _ in range(done + times - pushed[number][worker]):
                push(number, worker)
        for _ in range(times):
            part.say(2, PUSH)
    assert parts[0].held == parts[1].held
    assert parts[0].held[1][2] == times
    for number, part in enumerate(parts):
        for _ in range(done - clock):
            part.say(2, PUSH)
        assert part.held[1] == {0: pushed[number][0], 1: pushed[number][1], 2: done - clock + times}


def test_one_that_is_left_alone_goes_on() -> None:
    """Who waits for a round that nobody who is there comes to any more begins with the next one."""
    said = Said(1, 0)
    said.say(1, wire.Enter(SLOT, 3))
    said.say(1, PUSH)
    said.say(0, PUSH)
    assert said.held == (1, {0: 1})
    said.keep(said.shard.leave(0))
    assert said.held == (11, {0: 1, 1: 1})
    pull = said.say(1, PULL)
    assert said.is_answered(1, pull)


def test_who_is_back_goes_on_where_it_was() -> None:
    """A worker that was taken for gone has all its steps to do: it is not ahead of the others at their end."""
    said = Said(2, 1)
    said.keep(said.shard.leave(1))
    for _ in range(5):
        said.say(0, PUSH)
        assert said.is_answered(0, said.say(0, PULL))
    said.say(1, wire.Beat())
    ahead = said.say(0, PULL)
    assert not said.is_answered(0, ahead)
    end = said.say(0, wire.Barrier())
    for _ in range(5):
        said.say(1, PUSH)
        assert said.is_answered(1, said.say(1, PULL))
    assert said.is_answered(0, ahead)
    assert not said.is_answered(0, end)
    assert said.is_answered(1, said.say(1, wire.Barrier()))
    assert said.is_answered(0, end)
    assert said.held[1] == {0: 5, 1: 5}


def test_barriers_count_who_is_there() -> None:
    """One who joins comes to the next one of the slowest, for which all wait."""
    said = Said(2, None)
    for _ in range(2):
        for worker in (0, 1):
            said.say(worker, wire.Barrier())
    first = said.say(0, wire.Barrier())
    assert said.versions(2, wire.Join()) == {0: 3, 1: 2, 2: 2}
    last = said.say(1, wire.Barrier())
    assert not said.is_answered(0, first)
    mine = said.say(2, wire.Barrier())
    assert all(said.is_answered(worker, n) for worker, n in ((0, first), (1, last), (2, mine)))
    assert said.versions(2, wire.Beat()) == {0: 3, 1: 3, 2: 3}


def test_a_server_that_takes_anothers_place_knows_who_joined() -> None:
    """Where it began is in the snapshot; who joins meanwhile waits for those who were there."""
    said = Said(1, 1)
    for _ in range(4):
        said.say(0, PUSH)
    said.say(1, wire.Join())
    said.say(1, ENTER)
    again = Said(1, 1)
    again.shard = Shard(1, 1)
    restore(again.shard, image_of(said.shard, 1))
    assert again.shard.awaits == {0, 1}
    assert again.shard.slots.slices[SLOT].clock(1) == 4
    join = again.say(2, wire.Join())
    for worker, barriers in ((0, 7), (1, 7)):
        assert not again.is_answered(2, join)
        for body in (wire.Again(barriers), wire.Whole()):
            again.keep(
                again.shard.handle(Call(worker, 1, 1 + isinstance(body, wire.Whole), body), [])
            )
    assert again.answers[2, join].versions == {0: 7, 1: 7, 2: 7}


RECORD = StoreRecord("run", 1, None, ["tcp://127.0.0.1:1"], ["here"], has_keys=False, writes=False)


def members_of(store: dist.Store, *, is_later: bool) -> Members:
    return Members(store, "tcp://127.0.0.1:9/0", RECORD, is_later=is_later)


def test_who_joins_finds_keys_where_they_are() -> None:
    """Whatever was put where, in whatever order; values of another shape, and keys of nobody, are refused."""
    store = dist.HashStore()
    first, later = (members_of(store, is_later=is_later) for is_later in (False, True))
    held = {"w": Held(torch.Size([4, 2]), torch.float32), 3: Held(torch.Size([]), torch.int64)}
    parts = {"w": (ValuePart(1, 0, 2), ValuePart(0, 2, 4)), 3: (ValuePart(1, 0, 1),)}
    first.tell(held, parts)
    assert later.parts_of(held, lambda: True) == parts
    assert [later.next_rank() for _ in range(3)] == [1, 2, 3]
    with pytest.raises(KVStoreError) as refused:
        later.parts_of({"w": Held(torch.Size([5, 2]), torch.float32)}, lambda: True)
    assert str(refused.value) == (
        "wanted float32 [4, 2] for key 'w', as it was initialised, got float32 [5, 2]"
    )
    with pytest.raises(KVStoreError) as refused:
        later.parts_of({"3": held[3]}, lambda: False)
    assert str(refused.value) == (
        "wanted first values of keys ['3'] from worker 0, got none of some of them, and that worker is "
        "gone; restart with all workers"
    )


def test_a_silent_worker_is_replaced_under_another_number() -> None:
    """With its pushes in the values, and none of it waited for."""
    store = dist.HashStore()
    shard = Shard(1, 1)
    with serving(shard, lease_s=0.5) as server:
        first = RemoteShelf(
            [server.address], 0, 1, lease_s=0.5, members=members_of(store, is_later=False)
        )
        first.init({"w": torch.zeros(2)})
        register_updater("add for those who come later", add)
        first._servers.tell_all(wire.SetUpdater("add for those who come later"))
        shelves = [first]
        for lease_s in (5000.0, 0.5):  # the first one says nothing once it has pushed
            later = members_of(store, is_later=True)
            rank = later.next_rank()
            shelf = RemoteShelf([server.address], rank, 1, lease_s=lease_s, members=later)
            shelf.join()
            shelf.init({"w": torch.ones(2)})
            assert rank in shard.slots.slices[SLOT].since
            shelves.append(shelf)
            out = torch.empty(2)
            for _ in range(3):
                for one in (shelf, first):
                    one.push({"w": torch.full((2,), 10.0**one.rank)})
            for _ in range(2 if rank == 1 else 0):  # which is further than the silent one allows
                first.push({"w": torch.ones(2)})
            versions = first.read("w", [out], None)
            assert torch.equal(out, torch.full((2,), sum(n * 10.0**w for w, n in versions.items())))
            assert versions[rank] == 3
        assert versions == {0: 8, 1: 3, 2: 3}
        for shelf in shelves:
            shelf.close()


NOT_JOINED: dict[str, tuple[Wanted, str]] = {
    "more": (
        Wanted(2, join="tcp://127.0.0.1:9"),
        (
            "wanted staleness, servers, server_module, address and snapshots where a store begins, got one "
            "for a store to join, 'tcp://127.0.0.1:9', which has its own"
        ),
    ),
    "no address": (
        Wanted(join="somewhere"),
        (
            "wanted the address of a running store, such as 'tcp://10.0.0.3:29500/0', got 'somewhere'; it is "
            "`store.address` of its workers, or tcp://MASTER_ADDR:MASTER_PORT of their job"
        ),
    ),
}


@pytest.mark.parametrize("case", NOT_JOINED)
def test_what_cannot_be_joined_is_refused(case: str) -> None:
    """Before anybody is asked."""
    wanted, message = NOT_JOINED[case]
    with pytest.raises(KVStoreError) as refused:
        gather_later(wanted)
    assert str(refused.value) == message


def test_what_is_told_of_a_store_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without one, servers that this host does not reach, and those that want keys."""
    monkeypatch.delenv(VARIABLE, raising=False)
    short = datetime.timedelta(seconds=5)
    job = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=short)
    address = founded(job, 4, RECORD, is_first=False).address
    assert address == f"tcp://127.0.0.1:{job.port}/4"
    message = rf"^wanted store 4 of a job that runs at '{address}', got .*; make sure that its workers have "
    with monkeypatch.context() as patched:
        patched.setattr(members, "FIND_S", 0.2)  # in vain; not what is found below
        with pytest.raises(KVStoreError, match=message):
            gather_later(Wanted(join=address))
    founded(job, 4, RECORD, is_first=True)
    with pytest.raises(KVStoreError) as refused:
        gather_later(Wanted(join=address))
    assert str(refused.value) == (
        "wanted servers that this host reaches, got one at tcp://127.0.0.1:1 of another host; have the "
        "workers of that job create the store with address='tcp://HOST:*' and keys"
    )
    here = [members.host_identity()]
    kept = StoreRecord("run", 1, None, RECORD.addresses, here, has_keys=True, writes=False)
    founded(job, 4, kept, is_first=True)
    with pytest.raises(KVStoreError) as refused:
        gather_later(Wanted(join=address))
    assert str(refused.value) == (
        f"wanted keys to join the store at {address}, got none; name the directory that its workers have: "
        "keys=DIR or RIDGELINE_KVSTORE_KEYS=DIR"
    )
    written = StoreRecord("run", 1, None, RECORD.addresses, here, has_keys=False, writes=True)
    joined = founded(job, 4, written, is_first=True)
    notice = joined.notice()
    assert notice is not None
    notice.publish(0, FoundServer(2, "tcp://127.0.0.1:2"))
    assert gather_later(Wanted(join=address)).addresses == ["tcp://127.0.0.1:2"]


def test_a_server_outlives_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one beside a worker that has left goes on until all have, however long that takes."""
    server = beside.ServerBeside(1, None, "")
    first, later = (RemoteShelf([server.address], rank, 1) for rank in range(2))
    first.init({"w": torch.zeros(2)})
    later.init({"w": torch.zeros(2)})
    first.close()
    closing = threading.Thread(target=server.close)
    with monkeypatch.context() as patched:
        patched.setattr(beside, "END_S", 0.0)  # not later: its last answer takes a moment to leave
        closing.start()
        closing.join(1.0)
        assert closing.is_alive()
    out = torch.empty(2)
    later.read("w", [out], None)
    assert torch.equal(out, torch.zeros(2))
    later.close()
    closing.join()


def test_a_worker_that_fails_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may wait for its end, and for it: the server beside it ends with it."""
    monkeypatch.setattr(remote, "END_S", 0.0)
    server = beside.ServerBeside(1, None, "")
    first = RemoteShelf([server.address], 0, 1, server)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    other = Connection(context, server.address, 1, 1)
    other.ask(wire.Beat())
    with pytest.raises(ArithmeticError), contextlib.closing(first):
        raise ArithmeticError
    assert server._process.returncode == -signal.SIGKILL
    other.close()
    context.destroy(linger=0)
