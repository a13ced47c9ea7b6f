"""Who does not come to what a worker waits for at a server is named, and is not waited for again and again."""

from typing import Any

import pytest
import torch
import zmq
from served_here import connected, serving

from ridgeline.errors import EngineError, KVStoreError, UnansweredError
from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.joining.beside import ServerBeside
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Shard
from ridgeline.runtime.kvstore.serving.slices import Asked
from ridgeline.runtime.kvstore.serving.wire import Call, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.patience import Company, Patience
from ridgeline.runtime.kvstore.serving.worker.remote import RemoteShelf
from ridgeline.runtime.kvstore.updaters import SetOptimizer

SLOT, SHAPE = ValueSlot("w", 0), wire.Shape("float32", (2,))
FRAME = wire.frame_of(torch.ones(2))


class Asking:
    """Calls of workers, numbered, and the answer to each."""

    def __init__(self, workers: int, staleness: int | None) -> None:
        self.shard = Shard(workers, staleness)
        self._numbers = dict.fromkeys(range(workers), 0)

    def __call__(self, worker: int, body: wire.Body, *frames: memoryview) -> wire.Answer:
        self._numbers[worker] += 1
        number = self._numbers[worker]
        replies = self.shard.handle(Call(worker, 1, number, body), frames)
        (mine,) = [r for r in replies if r.to.worker == worker and r.answer.number == number]
        return mine.answer

    def again(self, worker: int, body: wire.Body) -> wire.Answer:
        """The same call once more."""
        reply: Reply
        (reply,) = self.shard.handle(Call(worker, 1, self._numbers[worker], body), ())
        return reply.answer


def stepping(workers: int, staleness: int) -> Asking:
    """With a value, and an optimizer."""
    ask = Asking(workers, staleness)
    ask(0, SetOptimizer("sgd", 1.0, {"lr": 0.1}))
    ask(0, wire.Init(SLOT, SHAPE), FRAME)
    return ask


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_pull_says_whose_pushes_are_missing(staleness: int) -> None:
    """Those of workers as far as this one are not; who has come since is not named when it asks again."""
    ask = stepping(4, staleness)
    for worker in (0, 1, *[0, 1] * staleness):
        ask(worker, wire.Push(SLOT, SHAPE), FRAME)
    parked = ask(0, wire.Pull(SLOT))
    assert (parked.is_parked, parked.awaits) == (True, (2, 3))
    ask(2, wire.Push(SLOT, SHAPE), FRAME)
    assert ask.again(0, wire.Pull(SLOT)).awaits == (3,)


def test_a_barrier_says_who_has_not_come() -> None:
    """In its round: the second one waits for nobody that is at the second."""
    ask = Asking(3, None)
    ask(1, wire.Barrier())
    assert ask(0, wire.Barrier()).awaits == (2,)


def test_a_first_value_is_waited_for_by_name() -> None:
    """Worker 0 gives it."""
    assert Asking(2, None)(1, wire.Know(SLOT, SHAPE)).awaits == (0,)


def test_what_waited_in_vain_once_waits_for_a_moment_then() -> None:
    """The calls behind it would each wait as long; until others come, or the server is heard of."""
    patience = Patience()
    at, calls = "tcp://127.0.0.1:1", ["Pull"]
    patience.check_came(at, 0, calls, 8.0, 8.0, [1])
    with pytest.raises(KVStoreError, match=r"got none of workers 1 and 2 for 9 s; make sure"):
        patience.check_came(at, 0, calls, 9.0, 8.0, {2, 1})
    with pytest.raises(KVStoreError, match=r"got none of worker 2 for 1 s"):
        patience.check_came(at, 0, calls, 1.0, 8.0, [2])
    patience.check_came(at, 0, calls, 1.0, 8.0, [])  # a slow answer is nobody's absence
    patience.came()
    patience.check_came(at, 0, calls, 1.0, 8.0, [2])
    with pytest.raises(
        KVStoreError, match=rf"^wanted an answer of the server at {at}, got none for 9"
    ):
        patience.check_heard(at, 9.0, 8.0)
    with pytest.raises(KVStoreError, match=r"got none for 1 s"):
        patience.check_heard(at, 1.0, 8.0)
    patience.heard()
    patience.check_heard(at, 1.0, 8.0)


def test_who_did_not_come_to_one_server_is_not_waited_for_as_long_at_another() -> None:
    """Else n servers would take n time-outs until the error is seen."""
    company = Company()
    first, second = Patience(company), Patience(company)
    with pytest.raises(UnansweredError) as raised:
        first.check_came("tcp://127.0.0.1:1", 0, ["Pull"], 9.0, 8.0, {2, 1})
    assert raised.value.workers == (1, 2)
    with pytest.raises(
        UnansweredError, match=r"at tcp://127.0.0.1:2, got none of worker 1 for 1 s"
    ):
        second.check_came("tcp://127.0.0.1:2", 0, ["Pull"], 1.0, 8.0, [1])


def test_an_answer_at_the_last_moment_is_one() -> None:
    """It has come: nobody is missing."""
    with (
        serving(Shard(1, None)) as server,
        connected(server.address, parked_s=0.0) as mine,
    ):
        numbers = mine.start([Asked(wire.Beat())])
        assert mine.socket.poll(60_000)
        assert len(mine.finish(numbers)) == 1


class Beside:
    """In place of a server of this worker's."""

    within_s: float | None = -1.0

    def close(self, within_s: float | None) -> None:
        self.within_s = within_s


@pytest.mark.parametrize(
    ("error", "within_s"),
    [
        (ValueError("its own"), 8.0),
        (UnansweredError("got none of worker 1", (1,)), 2.0),
        (None, None),
    ],
    ids=["its own", "of others", "none"],
)
def test_others_are_not_waited_for_again_before_the_error_is_seen(
    error: Exception | None, within_s: float | None
) -> None:
    """Who has waited in vain for them ends the server beside it soon; behind an error of its own they go on."""
    beside: Any = Beside()
    shelf = RemoteShelf([], 0, 2, beside, parked_s=8.0)
    try:
        if error is not None:
            raise EngineError("in a task") from error
    except EngineError:
        shelf.close()
    else:
        shelf.close()
    assert beside.within_s == within_s


def test_who_came_is_waited_for_in_full_again() -> None:
    """A barrier that others came to late in the end."""
    with (
        serving(Shard(2, None)) as server,
        connected(server.address, resend_s=0.02, parked_s=0.3) as mine,
        connected(server.address, 2) as beat,
    ):
        with pytest.raises(KVStoreError, match=r"got none of worker 1 for \d+ s"):
            mine.ask(wire.Barrier())
        other = RemoteShelf([server.address], 1, 2)
        try:
            other.barrier()
            beat.ask(wire.Beat())
            while mine._peer.patience.company.was_missed:
                assert mine.socket.poll(
                    60_000
                )  # each connection has messages in an order of its own
                mine.take_answers()
        finally:
            other.close()


def test_a_server_does_not_wait_for_who_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    """One that says only that it is there would keep its server, and who waits for that to end, for ever."""
    beside = ServerBeside(2, None, "", idle_s=0.5)
    shelf = RemoteShelf([beside.address], 1, 2, parked_s=0.5)
    shelf.present()
    beside.close()
    assert capfd.readouterr().err == (
        "wanted calls of worker 1, or the word that it leaves, got none for 0.5 s, though it says that it is "
        "there; the worker beside this server has left, so it ends: see what the other one does\n"
    )
    with pytest.raises(KVStoreError, match=r"^wanted an answer of the server at "):
        shelf.close()


def test_a_worker_leaves_a_silent_server_without_a_word() -> None:
    """It has waited for it as long as its group waits, and would wait as long again."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as deaf:
        deaf.bind("tcp://127.0.0.1:*")
        shelf = RemoteShelf([deaf.getsockopt_string(zmq.LAST_ENDPOINT)], 0, 1, parked_s=0.3)
        with pytest.raises(KVStoreError, match=r"^wanted an answer of the server at "):
            shelf.barrier()
        shelf.close()
        deaf.close(linger=0)
