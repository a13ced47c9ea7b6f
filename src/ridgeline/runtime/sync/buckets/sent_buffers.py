"""Buffers of worker 0 on their way to all: behind backward, or at its end where that writes them, too."""

from collections.abc import Callable

from ridgeline.engine import Engine, Variable
from ridgeline.runtime.sync.collectives import Collectives
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World

_FRAME = "broadcast_buffers"


class SentBuffers:
    """Has the buffers of all workers follow those of worker 0, once a step.

    Whether backward writes some (activations that are computed again) the workers tell each other behind
    gradients: one may leave out a layer that others compute again, in any step, and each would take the
    exchanges of the others for its own. On GPUs, where hearing that waits, the first step of a form tells.

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
        self._is_late = False
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

    @property
    def may_be_written(self) -> bool:
        """Whether backward may write what was sent before it."""
        return self.are_any and not self._is_late

    @property
    def are_written(self) -> bool:
        """Whether it has, where it may."""
        return self._buffers.versions != self._sent_versions

    def end(self, *, is_told: bool) -> None:
        """Backward is over: send what it has written; where the workers tell each other, see `receive`."""
        if self._is_late:
            self._send()
        elif not is_told and self.are_any and self.are_written:
            # By code that no worker has run before.
            self._wait(_FRAME, self._done)
            self._send()

    def receive(self, *, are_written: bool) -> None:
        """Wait for them, and fill this worker's.

        Args:
            are_written: Backward has written some on any worker: all send them again, and at the end of each
                step from this one on.
        """
        if not self.are_any:
            return
        self._wait(_FRAME, self._done)
        if are_written:
            self._is_late = True
            self._send()
            self._wait(_FRAME, self._done)
        if self._world.rank:
            self._buffers.unpack()

    def _send(self) -> None:
        if not self._world.rank:
            self._buffers.pack()
        self._collectives.broadcast(_FRAME, self._buffers.flats, self._done)
        self._sent_versions = self._buffers.versions
