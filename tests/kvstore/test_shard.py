"""A server's slices, behind a network that loses, repeats, delays and mixes up what workers send."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Sender, Shard
from ridgeline.runtime.kvstore.serving.wire import Answer, Body, Call, ValueSlot
from ridgeline.runtime.kvstore.updaters import SetOptimizer, register_updater

SLOTS = (ValueSlot("a", 0), ValueSlot("b", 0))


def add(key: Any, total: Tensor, value: Tensor) -> None:
    value.add_(total)


def failing_for_a(key: Any, total: Tensor, value: Tensor) -> None:
    if key == "a":
        raise ValueError("no")
    add(key, total, value)


class Worker:
    """A connection that numbers its calls and sends them again until they are answered."""

    def __init__(self, rank: int) -> None:
        self.sender = Sender(rank, 0)
        self.calls: list[Call] = []
        self.answers: dict[int, Reply] = {}

    def ask(self, body: Body) -> Call:
        call = Call(self.sender.worker, self.sender.channel, len(self.calls) + 1, body)
        self.calls.append(call)
        return call


def frames_of(call: Call) -> list[memoryview]:
    """A push of worker r brings 10^r, so that a sum tells who has pushed how often."""
    if isinstance(call.body, wire.Push | wire.Init):
        brought = 0 if isinstance(call.body, wire.Init) else 10**call.worker
        return [wire.frame_of(torch.full((1,), brought, dtype=torch.int64))]
    return []


class Network:
    """Workers and a server, and who is told what."""

    def __init__(self, num_workers: int, staleness: int | None, updater: str = "add up") -> None:
        self.shard = Shard(num_workers, staleness)
        self.staleness = staleness
        self.workers = [Worker(rank) for rank in range(num_workers)]
        shape = wire.Shape("int64", (1,))
        for slot in SLOTS:
            self.deliver(self.workers[0].ask(wire.Init(slot, shape)))
        for worker in self.workers:
            self.deliver(worker.ask(wire.SetUpdater(updater)))

    def deliver(self, call: Call) -> None:
        """A call arrives, once more or for the first time; its answers may get lost later."""
        for reply in self.shard.handle(call, frames_of(call)):
            if reply.answer.is_parked:
                continue
            worker = self.workers[reply.to.worker]
            copied = None if reply.tensor is None else reply.tensor.clone()
            worker.answers.setdefault(reply.answer.number, reply._replace(tensor=copied))

    def all_again(self) -> None:
        """Everybody sends what is not answered, as often as it takes."""
        for _ in range(sum(len(worker.calls) for worker in self.workers) + 1):
            for worker in self.workers:
                for call in worker.calls:
                    if call.number not in worker.answers:
                        self.deliver(call)


@pytest.mark.parametrize("staleness", [None, 0, 1, 3])
@settings(max_examples=150)
@given(data=st.data(), num_workers=st.integers(1, 4))
def test_whatever_the_network_does(
    staleness: int | None, data: st.DataObject, num_workers: int
) -> None:
    """Each push counts once; a pull sees the worker's own pushes; what a value holds only grows."""
    register_updater("add up", add)
    network = Network(num_workers, staleness)
    asked = data.draw(
        st.lists(
            st.tuples(st.integers(0, num_workers - 1), st.sampled_from(SLOTS), st.booleans()),
            max_size=25,
        )
    )
    for rank, slot, pushes in asked:
        worker = network.workers[rank]
        shape = wire.Shape("int64", (1,))
        worker.ask(wire.Push(slot, shape) if pushes else wire.Pull(slot))
        for _ in range(data.draw(st.integers(0, 3))):
            other = network.workers[data.draw(st.integers(0, num_workers - 1))]
            network.deliver(other.calls[data.draw(st.integers(0, len(other.calls) - 1))])
    network.all_again()
    finish(network)
    check(network)


def finish(network: Network) -> None:
    """Those who are behind go away, so that nobody waits for them for ever."""
    for worker in network.workers:
        network.deliver(worker.ask(wire.Leave()))
    network.all_again()


def check(network: Network) -> None:
    pushed = Counter[tuple[int, ValueSlot]]()
    for worker in network.workers:
        mine = Counter[ValueSlot]()
        newest: dict[ValueSlot, Counter[int]] = {}
        for call in worker.calls:
            reply = worker.answers.get(call.number)
            if isinstance(call.body, wire.Push):
                assert reply is not None
                assert not reply.answer.error
                mine[call.body.slot] += 1
                pushed[worker.sender.worker, call.body.slot] += 1
            elif isinstance(call.body, wire.Pull) and reply is not None:
                seen = Counter(reply.answer.versions)
                assert reply.tensor is not None
                told = sum(10**rank * times for rank, times in seen.items())
                if max(seen.values(), default=0) < 10 or len(network.workers) == 1:
                    assert reply.tensor.item() == told
                before = newest.setdefault(call.body.slot, Counter())
                assert all(seen[rank] >= times for rank, times in before.items())
                newest[call.body.slot] = seen
                assert seen[worker.sender.worker] >= mine[call.body.slot]
    for slot in SLOTS:
        value, versions = network.shard.slots.pull(slot, None)
        counted = {rank: pushed[rank, slot] for rank in range(len(network.workers))}
        assert {rank: n for rank, n in counted.items() if n} == dict(versions)
        assert value.item() == sum(10**rank * times for rank, times in counted.items())


@settings(max_examples=150)
@given(
    staleness=st.integers(0, 3),
    steps=st.lists(st.integers(0, 2), min_size=1, max_size=40),
)
def test_nobody_reads_too_far_ahead(staleness: int, steps: list[int]) -> None:
    """At no time has a worker that pushes and pulls in turns been answered more than s pushes ahead."""
    register_updater("add up", add)
    network = Network(3, staleness)
    slot, shape = SLOTS[0], wire.Shape("int64", (1,))
    waiting: dict[int, Call] = {}
    for rank in steps:
        worker = network.workers[rank]
        if rank in waiting and waiting[rank].number not in worker.answers:
            continue
        network.deliver(worker.ask(wire.Push(slot, shape)))
        waiting[rank] = worker.ask(wire.Pull(slot))
        network.deliver(waiting[rank])
        counts = [sum(isinstance(c.body, wire.Push) for c in w.calls) for w in network.workers]
        for other, call in waiting.items():
            if call.number in network.workers[other].answers:
                seen = network.workers[other].answers[call.number].answer.versions
                mine = sum(
                    isinstance(c.body, wire.Push)
                    for c in network.workers[other].calls
                    if c.number < call.number
                )
                assert mine - min(seen.get(r, 0) for r in range(3)) <= staleness
        assert max(counts) - min(counts) <= staleness + 1


def test_rounds_are_those_of_synchronous_workers() -> None:
    """With s = 0 a value holds whole rounds alone, in the order of workers."""
    register_updater("add up", add)
    network = Network(2, 0)
    slot, shape = SLOTS[0], wire.Shape("int64", (1,))
    fast, slow = network.workers
    network.deliver(fast.ask(wire.Push(slot, shape)))
    network.deliver(fast.ask(wire.Push(slot, shape)))
    network.deliver(slow.ask(wire.Pull(slot)))
    assert slow.answers[len(slow.calls)].tensor == torch.tensor([0])
    pull = fast.ask(wire.Pull(slot))
    network.deliver(pull)
    assert pull.number not in fast.answers
    network.deliver(slow.ask(wire.Push(slot, shape)))
    assert pull.number not in fast.answers
    network.deliver(slow.ask(wire.Push(slot, shape)))
    assert fast.answers[pull.number].tensor == torch.tensor([22])


def test_who_is_gone_is_not_waited_for() -> None:
    """A worker whose lease has ended leaves clock, rounds and barriers."""
    register_updater("add up", add)
    for staleness in (0, 1):
        network = Network(3, staleness)
        slot, shape = SLOTS[0], wire.Shape("int64", (1,))
        for worker in network.workers[:2]:
            for _ in range(2):
                network.deliver(worker.ask(wire.Push(slot, shape)))
        calls = [worker.ask(wire.Pull(slot)) for worker in network.workers[:2]]
        calls += [worker.ask(wire.Barrier()) for worker in network.workers[:2]]
        for call in calls:
            network.deliver(call)
        waited = [c for c in calls if c.number not in network.workers[c.worker].answers]
        assert len(waited) == 4
        answered = [reply.answer.number for reply in network.shard.leave(2)]
        assert len(answered) == 4


@pytest.mark.parametrize("leaves", [False, True])
def test_a_round_that_cannot_be_worked_in_is_told_to_all(leaves: bool) -> None:
    """Also where it is complete since a worker is gone: the server goes on, and other keys do."""
    register_updater("fail for a", failing_for_a)
    network = Network(3, 0, "fail for a")
    one, other, third = network.workers
    shape = wire.Shape("int64", (1,))
    for slot in SLOTS:
        for worker in (one, other):
            network.deliver(worker.ask(wire.Push(slot, shape)))
    pulls = {slot: one.ask(wire.Pull(slot)) for slot in SLOTS}
    for pull in pulls.values():
        network.deliver(pull)
    if leaves:
        one.answers |= {r.answer.number: r for r in network.shard.leave(2) if r.to == one.sender}
    else:
        for slot in SLOTS:
            network.deliver(third.ask(wire.Push(slot, shape)))
        assert "got ValueError: no" in third.answers[len(third.calls) - 1].answer.error
    failed, held = (one.answers[pulls[slot].number] for slot in SLOTS)
    assert failed.answer.error == (
        "wanted a value of key 'a' with all rounds worked in, got one that failed: wanted updater 'fail for "
        "a' to update key 'a', got ValueError: no; restart from a checkpoint, with an optimizer that takes "
        "what is pushed"
    )
    assert held.tensor == torch.tensor([11 if leaves else 111])
    push = other.ask(wire.Push(SLOTS[0], shape))
    network.deliver(push)
    assert other.answers[push.number].answer.error == failed.answer.error


def test_a_barrier_tells_of_a_round_that_failed_before() -> None:
    """All who pushed to it, also those whose push had come before it was complete; no others."""
    register_updater("fail for a", failing_for_a)
    network = Network(2, 0, "fail for a")
    shape = wire.Shape("int64", (1,))
    for worker in network.workers:
        network.deliver(worker.ask(wire.Push(SLOTS[0], shape)))
    barriers = [worker.ask(wire.Barrier()) for worker in network.workers]
    for barrier in barriers:
        network.deliver(barrier)
    for worker, barrier in zip(network.workers, barriers, strict=True):
        told = worker.answers[barrier.number].answer.error
        assert told.startswith(
            "wanted a value of key 'a' with all rounds worked in, got one that failed"
        )
    network.shard.slots.check_rounds(7)


REFUSED: dict[str, tuple[Body, list[memoryview], str]] = {
    "unknown": (
        wire.Pull(ValueSlot("c", 0)),
        [],
        "wanted a key with a value, got 'c'; call init first",
    ),
    "another shape": (
        wire.Push(SLOTS[0], wire.Shape("int64", (2,))),
        [memoryview(bytearray(16))],
        "wanted int64 [1] for key 'a' from row 0 on, as it was initialised, got int64 [2]",
    ),
    "too few bytes": (
        wire.Push(SLOTS[0], wire.Shape("int64", (1,))),
        [memoryview(bytearray(4))],
        "wanted 8 bytes of int64 [1], got 4",
    ),
    "no frame": (wire.Push(SLOTS[0], wire.Shape("int64", (1,))), [], "wanted 1 frames, got 0"),
    "a row that is none": (
        wire.Pull(SLOTS[0], 1),
        [wire.frame_of(torch.tensor([1]))],
        "wanted rows of key 'a' from 0 to 0, got 1 to 1",
    ),
    "no updater": (
        wire.SetUpdater("unheard"),
        [],
        (
            "wanted a registered updater, got 'unheard'; call rl.kvstore.register_updater('unheard', "
            "function) in every process first"
        ),
    ),
    "states": (
        wire.LoadStates(3),
        [memoryview(bytearray(b"abc"))],
        "wanted states of an optimizer, got Error while deserializing: header too small",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case: str) -> None:
    """With a message, again where it comes again, and others go on."""
    register_updater("add up", add)
    body, frames, message = REFUSED[case]
    network = Network(1, None)
    call = network.workers[0].ask(body)
    for _ in range(2):
        (reply,) = network.shard.handle(call, frames)
        assert reply == Reply(Sender(0, 0), Answer(call.number, message))
    network.deliver(network.workers[0].ask(wire.Push(SLOTS[0], wire.Shape("int64", (1,)))))
    assert network.shard.slots.pull(SLOTS[0], None)[0] == torch.tensor([1])


def test_an_asynchronous_push_needs_an_updater() -> None:
    """Nothing says otherwise what it does to a value."""
    shard = Shard(1, None)
    shape = wire.Shape("int64", (1,))
    frames = [wire.frame_of(torch.zeros(1, dtype=torch.int64))]
    shard.handle(Call(0, 0, 1, wire.Init(SLOTS[0], shape)), frames)
    (reply,) = shard.handle(Call(0, 0, 2, wire.Push(SLOTS[0], shape)), frames)
    assert reply.answer.error == (
        "wanted an optimizer or updater before the first push to key 'a', since nothing says what an "
        "asynchronous push does to a value, got none; call set_optimizer"
    )


def test_rows_of_a_round_stay_rows() -> None:
    """An optimizer that takes nothing else gets the sum of what workers bring, each row once."""
    shard = Shard(2, 0)
    slot, shape = SLOTS[0], wire.Shape("float32", (3, 2))
    value = torch.zeros(3, 2)
    shard.handle(Call(0, 0, 1, wire.Init(slot, shape)), [wire.frame_of(value)])
    shard.handle(Call(0, 0, 2, SetOptimizer("sparseadam", 1.0, {"lr": 1.0})), [])
    for worker, number, rows in ((0, 3, [0, 2]), (1, 1, [2])):
        body = wire.PushRows(slot, wire.Shape("float32", (len(rows), 2)))
        frames = [wire.frame_of(torch.tensor(rows)), wire.frame_of(torch.ones(len(rows), 2))]
        replies = shard.handle(Call(worker, 0, number, body), frames)
        assert [reply.answer.error for reply in replies] == [""]
    found, _ = shard.slots.pull(slot, None)
    assert torch.allclose(found, torch.tensor([[-1.0, -1.0], [0.0, 0.0], [-1.0, -1.0]]), atol=1e-4)
