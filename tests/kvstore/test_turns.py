"""Several servers are asked in turns: none waits until another one has answered all that it was asked."""

import threading
from collections.abc import Sequence

import torch
from served_here import serving

from ridgeline.runtime.kvstore.serving import wire
from ridgeline.runtime.kvstore.serving.server.actions import Frames
from ridgeline.runtime.kvstore.serving.server.shard import Reply, Shard
from ridgeline.runtime.kvstore.serving.slices import Asked
from ridgeline.runtime.kvstore.serving.wire import Call, ValueSlot
from ridgeline.runtime.kvstore.serving.worker.channel import WINDOW
from ridgeline.runtime.kvstore.serving.worker.connections import Connections

CALLS = 3 * WINDOW
GUARD_S = 60.0
SLOT = ValueSlot("w", 0)


class Counting(Shard):
    """Counts pulls, and begins with them only once others have answered theirs."""

    def __init__(self, after: Sequence["Counting"] = ()) -> None:
        super().__init__(1, None)
        self.after = after
        self.all_came = threading.Event()
        self.is_in_time = True
        self.pulls = 0

    def handle(self, call: Call, frames: Frames) -> list[Reply]:
        """As any shard, but late."""
        if isinstance(call.body, wire.Pull):
            self.is_in_time &= all(other.all_came.wait(GUARD_S) for other in self.after)
            self.pulls += 1
            if self.pulls == CALLS:
                self.all_came.set()
        return super().handle(call, frames)


def test_a_slow_server_keeps_no_other_from_its_calls() -> None:
    """The second one answers more calls than are under way at a time before the first one answers any."""
    fast = Counting()
    slow = Counting(after=[fast])
    value = torch.arange(4.0)
    with serving(slow) as first, serving(fast) as second:
        servers = Connections([first.address, second.address], 0, beat_s=GUARD_S)
        init = wire.Init(SLOT, wire.shape_of(value))
        servers.ask([Asked(init, (value + place,), place=place) for place in (0, 1)])
        calls = [Asked(wire.Pull(SLOT), place=n % 2) for n in range(2 * CALLS)]
        answers = servers.ask(calls)
        servers.close()
    assert slow.is_in_time
    assert (slow.pulls, fast.pulls) == (CALLS, CALLS)
    for call, one in zip(calls, answers, strict=True):
        assert one.tensor is not None
        assert torch.equal(one.tensor, value + call.place)
