"""A server's slices, lost with it again and again, behind a network that loses, repeats and mixes up messages.

What a server takes the place of another one with is what that had written down. Workers keep the rest.
"""

from collections import Counter

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_shard import SLOTS, add, frames_of

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.addressing.epochs import FoundServer
from ridgeline.runtime.kvstore.serving.server.images import Image, image_of, restore
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Sender, Shard
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, Call, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.peer import Kept, Peer
from ridgeline.runtime.kvstore.updaters import SetOptimizer, register_updater

SHAPE = wire.Shape("int64", (1,))
ACTIONS = ("push", "pull", "deliver", "begin", "write", "restart", "follow")


class Servers:
    """The one that is there now, and what those before it have written."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self.num_workers, self.staleness = num_workers, staleness
        self.epoch, self.begun, self.durable = 0, 0, 0
        self.written: Image | None = None
        self.begin_new()

    def begin_new(self) -> None:
        self.epoch += 1
        self.shard = Shard(self.num_workers, self.staleness)
        self.taken_down: Image | None = None
        if self.written is not None:
            restore(self.shard, self.written)
        elif self.epoch > 1:
            self.shard.awaits = set(range(self.num_workers))
        self.begun = self.durable = 0 if self.written is None else self.written.number

    def begin(self) -> None:
        if self.taken_down is None:
            self.begun += 1
            self.taken_down = image_of(self.shard, self.begun)

    def write(self) -> None:
        if self.taken_down is not None:
            self.written, self.taken_down = self.taken_down, None
            self.durable = self.begun

    def handle(self, call: Call) -> list[Reply]:
        """Replies with what a server says of itself; none to calls that are meant for another one."""
        if call.epoch != self.epoch:
            return []
        says = {"epoch": self.epoch, "begun": self.begun, "durable": self.durable}
        return [
            reply._replace(
                answer=msgspec.structs.replace(reply.answer, **says),
                tensor=None if reply.tensor is None else reply.tensor.clone(),
            )
            for reply in self.shard.handle(call, frames_of(call))
        ]


class Asked:
    """A call of a worker, and its answer once there is one."""

    def __init__(self, body: Body, pushed_before: int) -> None:
        self.body = body
        self.pushed_before = pushed_before
        self.reply: Reply | None = None


class Line:
    """A connection of a worker, for one slice: calls in order, each again until it is answered."""

    def __init__(self, rank: int, channel: int, peer: Peer) -> None:
        self.rank, self.channel, self.peer = rank, channel, peer
        self.asked: list[Asked] = []
        self.epoch = peer.found.epoch
        self.first = 0

    def ask(self, body: Body) -> None:
        before = sum(isinstance(one.body, wire.Push) for one in self.asked)
        self.asked.append(Asked(self.peer.numbered(body), before))

    def move(self) -> None:
        """What is not answered is asked of the newer server; its numbers begin anew."""
        if self.epoch != self.peer.found.epoch:
            self.epoch = self.peer.found.epoch
            self.asked = [one for one in self.asked if one.reply] + [
                one for one in self.asked if not one.reply
            ]
            self.first = sum(one.reply is not None for one in self.asked)

    def calls(self) -> list[Call]:
        """All that was asked of this server, answered or not: any may come again."""
        found = []
        for number, one in enumerate(self.asked[self.first :], 1):
            if one.reply is None:
                self.peer.sent(one.body, ())
            found.append(Call(self.rank, self.channel, number, one.body, epoch=self.epoch))
        return found

    def hear(self, answer: Answer, reply: Reply) -> None:
        place = self.first + answer.number - 1
        if answer.epoch != self.epoch or answer.is_parked or self.asked[place].reply is not None:
            return
        self.asked[place].reply = reply
        self.peer.answered(self.rank, self.asked[place].body, answer)


class Network:
    """Workers with a line for each slice, and the servers."""

    def __init__(self, num_workers: int, staleness: int | None) -> None:
        self.servers = Servers(num_workers, staleness)
        self.peers = [Peer(FoundServer(1, "")) for _ in range(num_workers)]
        self.lines = [
            Line(rank, channel, peer)
            for rank, peer in enumerate(self.peers)
            for channel in range(len(SLOTS))
        ]
        self.old: list[Call] = []
        # Answered only when it is written, as `Server` does it.
        for rank in range(num_workers):
            self.servers.shard.handle(Call(rank, 9, 1, wire.SetUpdater("add up there")), [])
        self.servers.begin()
        self.servers.write()
        for line in self.lines:
            if not line.rank:
                line.ask(wire.Init(SLOTS[line.channel], SHAPE))
            line.ask(wire.Know(SLOTS[line.channel], SHAPE))
        self.all_again()

    def deliver(self, call: Call, *, is_heard: bool = True) -> None:
        for reply in self.servers.handle(call):
            line = next(
                (o for o in self.lines if (o.rank, o.channel) == tuple(reply.to)),
                None,
            )
            if is_heard and line is not None:
                line.hear(reply.answer, reply)

    def follow(self, rank: int) -> None:
        """A worker finds the newer server, and sends what that may lack; what is lost comes again."""
        peer, servers = self.peers[rank], self.servers

        def send(there: Peer, kept: list[Kept]) -> None:
            bodies = [wire.Again(0), *(one.body for one in kept), wire.Whole()]
            for number, body in enumerate(bodies, 1):
                there.sent(body, ())
                call = Call(rank, 100, number, body, epoch=there.found.epoch)
                for reply in [*servers.handle(call), *servers.handle(call)]:
                    if reply.to == Sender(rank, 100) and reply.answer.number == number:
                        assert not reply.answer.is_parked
                        there.answered(rank, body, reply.answer)
                    elif reply.to.channel < 100:
                        line = self.lines[reply.to.worker * len(SLOTS) + reply.to.channel]
                        line.hear(reply.answer, reply)

        self.old += [call for line in self.lines if line.rank == rank for call in line.calls()]
        peer.follow(FoundServer(servers.epoch, ""), send)
        for line in self.lines:
            if line.rank == rank:
                line.move()

    def all_again(self) -> None:
        """Everybody finds the server and sends what is not answered, as often as it takes."""
        for rank in range(len(self.peers)):
            self.follow(rank)
        num_open = -1
        while num_open != (num_open := self.num_open()):
            for line in self.lines:
                for call in line.calls():
                    if line.asked[line.first + call.number - 1].reply is None:
                        self.deliver(call)

    def num_open(self) -> int:
        return sum(one.reply is None for line in self.lines for one in line.asked)


@pytest.mark.parametrize("staleness", [None, 0, 1, 3])
@settings(max_examples=200)
@given(data=st.data(), num_workers=st.integers(1, 3))
def test_whenever_servers_die(staleness: int | None, data: st.DataObject, num_workers: int) -> None:
    """Each push counts once; a pull sees the worker's own; what a value holds only grows, for each worker."""
    register_updater("add up there", add)
    network = Network(num_workers, staleness)
    servers = network.servers
    for _ in range(data.draw(st.integers(0, 30))):
        action = data.draw(st.sampled_from(ACTIONS))
        line = network.lines[data.draw(st.integers(0, len(network.lines) - 1))]
        slot = SLOTS[line.channel]
        if action in ("push", "pull"):
            line.ask(wire.Push(slot, SHAPE) if action == "push" else wire.Pull(slot))
            if data.draw(st.booleans()):
                for call in line.calls():
                    network.deliver(call)
        elif action == "deliver":
            calls = [*line.calls(), *network.old[-3:]]
            if calls:
                call = calls[data.draw(st.integers(0, len(calls) - 1))]
                network.deliver(call, is_heard=data.draw(st.booleans()))
        elif action == "begin":
            servers.begin()
        elif action == "write":
            servers.begin()
            servers.write()
        elif action == "restart":
            network.follow(0)  # who gave first values is there when others push to them
            servers.begin_new()
            network.follow(0)
        else:
            network.follow(line.rank)
    check_staleness(network)
    network.all_again()
    for rank in range(
        num_workers
    ):  # those who are behind go away, so that nobody waits for them for ever
        for reply in servers.shard.leave(rank):
            network.lines[reply.to.worker * len(SLOTS) + reply.to.channel].hear(
                Answer(reply.answer.number, versions=reply.answer.versions, epoch=servers.epoch),
                reply._replace(tensor=None if reply.tensor is None else reply.tensor.clone()),
            )
    network.all_again()
    check(network)


def check_staleness(network: Network) -> None:
    """Nobody was told a value of which another one is too far behind."""
    servers = network.servers
    if not servers.staleness:
        return
    for line in network.lines:
        for one in line.asked:
            if isinstance(one.body, wire.Pull) and one.reply is not None:
                seen = one.reply.answer.versions
                behind = min(seen.get(rank, 0) for rank in range(len(network.peers)))
                if one.pushed_before:
                    assert seen[line.rank] - behind <= servers.staleness


def check(network: Network) -> None:
    pushed: Counter[tuple[int, ValueSlot]] = Counter()
    for line in network.lines:
        newest: Counter[int] = Counter()
        for one in line.asked:
            assert one.reply is not None or isinstance(one.body, wire.Pull)
            if isinstance(one.body, wire.Push):
                assert one.reply is not None
                assert not one.reply.answer.error
                pushed[line.rank, one.body.slot] += 1
            elif isinstance(one.body, wire.Pull) and one.reply is not None:
                seen = Counter(one.reply.answer.versions)
                assert all(seen[rank] >= times for rank, times in newest.items())
                assert seen[line.rank] >= one.pushed_before
                newest = seen
    for slot in SLOTS:
        value, versions = network.servers.shard.slots.pull(slot, None)
        counted = {rank: pushed[rank, slot] for rank in range(len(network.peers))}
        assert {rank: n for rank, n in counted.items() if n} == {
            rank: n for rank, n in versions.items() if n
        }
        wanted = torch.tensor([sum(10**rank * times for rank, times in counted.items())])
        assert torch.equal(value, wanted)


def test_nobody_reads_before_all_have_sent_again() -> None:
    """What one worker was told once is not taken back, though another one has not found the new server yet."""
    register_updater("add up there", add)
    network = Network(2, None)
    mine, other = network.lines[0], network.lines[len(SLOTS)]
    other.ask(wire.Push(SLOTS[0], SHAPE))
    network.all_again()
    mine.ask(wire.Pull(SLOTS[0]))
    network.all_again()
    network.servers.begin_new()
    network.follow(0)
    mine.ask(wire.Pull(SLOTS[0]))
    for call in mine.calls():
        network.deliver(call)
    assert mine.asked[-1].reply is None
    network.follow(1)
    before, after = mine.asked[-2].reply, mine.asked[-1].reply
    assert before is not None
    assert after is not None
    assert before.answer.versions == after.answer.versions == {1: 1}
    assert after.tensor == torch.tensor([10])


def test_who_is_gone_with_a_server_is_not_waited_for() -> None:
    """What it pushed since the last snapshot is lost, and the others go on."""
    register_updater("add up there", add)
    network = Network(2, 1)
    mine, other = network.lines[0], network.lines[len(SLOTS)]
    mine.ask(wire.Push(SLOTS[0], SHAPE))
    network.all_again()
    network.servers.begin()
    network.servers.write()
    other.ask(wire.Push(SLOTS[0], SHAPE))
    network.all_again()
    network.servers.begin_new()
    network.follow(0)
    mine.ask(wire.Pull(SLOTS[0]))
    for call in mine.calls():
        network.deliver(call)
    assert mine.asked[-1].reply is None
    (reply,) = network.servers.shard.leave(1)
    assert reply.tensor == torch.tensor([1])


def test_barriers_that_were_passed_count() -> None:
    """Who was told of a barrier does not keep the others from being told by another server."""
    shard = Shard(2, None)
    shard.awaits = {0, 1}
    shard.handle(Call(0, 1, 1, wire.Again(3)), [])
    shard.handle(Call(0, 1, 2, wire.Whole()), [])
    shard.handle(Call(1, 1, 1, wire.Again(2)), [])
    (parked,) = shard.handle(Call(1, 2, 1, wire.Barrier()), [])
    assert parked.answer.is_parked
    told = shard.handle(Call(1, 1, 2, wire.Whole()), [])
    assert [(reply.to.channel, reply.answer.is_parked) for reply in told] == [
        (1, False),
        (2, False),
    ]


def test_other_settings_wait_for_what_was_pushed_before() -> None:
    """A push that a worker sends again to a new server is worked in with the settings under which it was taken."""
    shape, ones = wire.Shape("float32", (1,)), [wire.frame_of(torch.ones(1))]
    shard = Shard(2, None)
    shard.handle(Call(0, 1, 1, wire.Init(SLOTS[0], shape)), [wire.frame_of(torch.zeros(1))])
    shard.handle(Call(0, 1, 2, SetOptimizer("sgd", 1.0, {"lr": 1.0})), [])
    shard.awaits = {0, 1}
    shard.handle(Call(0, 2, 1, wire.Whole()), [])
    (parked,) = shard.handle(Call(0, 3, 1, SetOptimizer("sgd", 1.0, {"lr": 10.0})), [])
    assert parked.answer.is_parked
    shard.handle(Call(1, 2, 1, wire.Push(SLOTS[0], shape)), ones)
    told = shard.handle(Call(1, 2, 2, wire.Whole()), [])
    assert [(reply.to.worker, reply.answer.is_parked) for reply in told] == [(1, False), (0, False)]
    assert shard.slots.pull(SLOTS[0], None)[0] == -1.0
    shard.handle(Call(1, 3, 1, wire.Push(SLOTS[0], shape)), ones)
    assert shard.slots.pull(SLOTS[0], None)[0] == -11.0


def test_a_push_waits_for_the_first_value() -> None:
    """Which comes from another worker, to a server that had not written it; each is done once."""
    register_updater("add up there", add)
    shard = Shard(2, None)
    shard.awaits = {0, 1}
    shard.handle(Call(1, 1, 1, wire.SetUpdater("add up there")), [])
    push = Call(1, 1, 2, wire.Push(SLOTS[0], SHAPE, number=1))
    for _ in range(2):
        (reply,) = shard.handle(push, frames_of(push))
        assert reply.answer.is_parked
    init = Call(0, 1, 1, wire.Init(SLOTS[0], SHAPE))
    told = shard.handle(init, frames_of(init))
    assert [(reply.to.worker, reply.answer.error) for reply in told] == [(0, ""), (1, "")]
    value, versions = shard.slots.pull(SLOTS[0], None)
    assert (value.item(), versions) == (10, {1: 1})


def test_nobody_waits_for_a_first_value_of_who_is_gone() -> None:
    """Who waited is told once the lease of the first worker has ended, and who asks later is at once."""
    shard = Shard(2, None)
    (parked,) = shard.handle(Call(1, 1, 1, wire.Know(SLOTS[0], SHAPE)), [])
    assert parked.answer.is_parked
    told = shard.leave(0)
    told += shard.handle(Call(1, 1, 2, wire.Know(SLOTS[1], SHAPE)), [])
    assert [(reply.to.worker, reply.answer.number, reply.answer.error) for reply in told] == [
        (
            1,
            number,
            (
                f"wanted a first value of key {slot.key!r} from worker 0, got none, and that worker is gone; "
                "restart with all workers"
            ),
        )
        for number, slot in ((1, SLOTS[0]), (2, SLOTS[1]))
    ]


def test_a_server_that_lacks_pushes_says_so() -> None:
    """Such as one whose snapshots were taken away: it does not count on as if nothing had been there."""
    register_updater("add up there", add)
    shard = Shard(1, None)
    init = Call(0, 1, 1, wire.Init(SLOTS[0], SHAPE))
    shard.handle(init, frames_of(init))
    push = Call(0, 1, 2, wire.Push(SLOTS[0], SHAPE, number=3))
    (reply,) = shard.handle(push, frames_of(push))
    assert reply.answer.error == (
        "wanted push 1 of worker 0 to key 'a', got push 3: this server does not have what was pushed "
        "before; restart from a checkpoint"
    )
