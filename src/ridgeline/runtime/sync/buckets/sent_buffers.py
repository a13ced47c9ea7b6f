"""Buffers of worker 0 on their way to all: behind backward, or at its end where that writes them, too."""

from collections.abc import Callable

from ridgeline.engine import Engine, Variable
from ridgeline.runtime.sync.collectives import Collectives
from ridgeline.workers.agree import largest_of_workers
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World

_FRAME = "broadcast_buffers"


class SentBuffers:
    """Has the buffers of all workers follow those of worker 0, once a step.

    Whether backward writes some (activations that are computed again) the workers agree on, when the first
    step of a form has shown it: one may leave out a layer that others compute again, and each would take the
    exchanges of the others for its own.

    Args:
        buffers: Of this worker's model.
        world: This worker's place; size at least 2.
        engine: Runs `collectives`.
        collectives: Of the step.
        wait: Returns when the exchange of a frame, which writes a variable, is over.
    """

    def __init__(
        self,
        buffers: FlatBuffers,
        world: World,
        engine: Engine,
        collectives: Collectives,
        wait: Callable[[str, Variable], None],
    ) -> None:
        self._buffers, self._world = buffers, world
        self._engine, self._collectives, self._wait = engine, collectives, wait
        self._is_late = self._is_written = False
        self.are_any = bool(buffers.flats)
        self.arrange()

    def arrange(self) -> None:
        """Buckets were cut: what is sent from now on is in no order with what was."""
        self._done = self._engine.variable("buffers")

    def begin(self) -> None:
        """Forward is over: send them, unless backward is going to write them."""
        self._done.forget_events()
        if self.are_any and not self._is_late:
            self._send()

    def end(self, *, is_agreed: bool) -> None:
        """Backward is over: send what it has written; where the workers have not agreed yet, see `agree`."""
        self._is_written = self.are_any and self._buffers.versions != self._sent_versions
        if self._is_late:
            self._send()
        elif self._is_written and is_agreed:  # by code that no worker has run before
            self._wait(_FRAME, self._done)
            self._send()

    def receive(self) -> None:
        """Wait for them, and fill this worker's."""
        if self.are_any:
            self._wait(_FRAME, self._done)
            if self._world.rank:
                self._buffers.unpack()

    def agree(self) -> None:
        """Have all send at the end of each step, from this one on, where backward has written some on any."""
        if self.are_any and not self._is_late:
            self._is_late = largest_of_workers(float(self._is_written), self._world) > 0
            if self._is_late:
                self._send()
                self.receive()

    def _send(self) -> None:
        if not self._world.rank:
            self._buffers.pack()
        self._collectives.broadcast(_FRAME, self._buffers.flats, self._done)
        self._sent_versions = self._buffers.versions
