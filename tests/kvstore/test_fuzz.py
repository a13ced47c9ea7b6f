"""Mutated messages are messages or refused, and no server fails of them; `fuzz_wire.py` runs a million."""

import pytest
from fuzz_wire import fuzz

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.shard import Shard
from ridgeline.runtime.kvstore.serving.wire import Call


@pytest.mark.parametrize("seed", range(2))
def test_mutated_messages_are_messages_or_refused(seed: int) -> None:
    """And some are calls that are done, so that not all end in the decoder."""
    counts = fuzz(5_000, seed)
    assert counts.refused > 1000
    assert counts.failed > 100
    assert counts.done > 100


def test_a_call_that_comes_again_as_another_is_refused() -> None:
    """A barrier has a place among its worker's, which another call has not."""
    shard = Shard(1, None)
    shard.handle(Call(0, 1, 1, wire.Beat()), [])
    (reply,) = shard.handle(Call(0, 1, 1, wire.Barrier()), [])
    assert reply.answer.error == (
        "wanted the call again that was call 1 of this connection, got a barrier"
    )
