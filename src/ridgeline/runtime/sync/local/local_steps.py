"""Local steps: every worker trains alone, and now and then they exchange how far they have come.

In most steps a worker knows nothing of the others. Every `every` steps the difference between the last
common parameters and this worker's own, the pseudo-gradient, goes the way that gradients would go: in
buckets, by the plan's transport, and so through its codec. The outer optimizer (see `outer`) applies the mean
to the common parameters, from which all continue with the same bits. Buffers of worker 0 go to all then, and
frozen parameters that the step writes. What the inner optimizer remembers stays each worker's own.

With several fragments each exchange is of one of them, and each of them is exchanged once in `every` steps:
what travels at once is smaller, and no less in all. With a delay steps continue while a fragment travels; the
common parameters change when it has arrived, and a worker continues from between them and its own.

Source: Douillard et al., "DiLoCo", 2023, and "Streaming DiLoCo", 2025.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.plan import Sync, cut_buckets
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.layout.initial_state import take_buffers
from ridgeline.runtime.layout.same_state import note_trained_apart
from ridgeline.runtime.sync.buckets.arrangement import Named, expected_order, sizes_of
from ridgeline.runtime.sync.buckets.buckets import Allocate, Bucket
from ridgeline.runtime.sync.buckets.coverage import Coverage, check_shape
from ridgeline.runtime.sync.collectives import exchange_frame
from ridgeline.runtime.sync.frozen_writes import FrozenWrites
from ridgeline.runtime.sync.local.flights import Flights
from ridgeline.runtime.sync.local.outer import OuterOptimizer
from ridgeline.runtime.sync.synchronizer import UpdatesAtOnce
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import (
    cut_fragments,
    delay_of,
    due_fragment,
    fragments_on_their_way,
    frame_names,
    landing_fragment,
    outer_values,
    values_of,
)
from ridgeline.workers import attendance
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World

COUNT = "local_steps"


class LocalSteps(UpdatesAtOnce):
    """Exchanges the parameters of workers that train alone in between; a `Synchronizer`.

    All workers make the same steps. On a GPU an exchange is enqueued behind the optimizer; on a CPU
    `after_step` returns when it is over, or after a delay with what was begun before.

    Args:
        parameters: (name, parameter) of every parameter; those that require gradients now are exchanged.
        buffers: Buffers that follow worker 0 at each exchange of the last fragment.
        world: This worker's place; size at least 2.
        sync: How often, by which outer optimizer and in which buckets.
        transport: Makes the mean of each bucket.
        order: Names in the order in which gradients are expected, by which buckets are cut as if they held
            these; None: reverse order of registration.

    Attributes:
        overhead_ns: 0: what it does is exchange.
        num_steps: Steps since the workers had nothing but common parameters for the first time.
        num_exchanges: Exchanges that ended since this was made.
    """

    trains_apart = True

    def __init__(
        self,
        parameters: Sequence[Named],
        buffers: FlatBuffers,
        *,
        world: World,
        sync: Sync,
        transport: Transport,
        order: Sequence[str] | None = None,
    ) -> None:
        trained = [(n, p) for n, p in parameters if p.requires_grad]
        options = values_of(sync)
        self._num_fragments = int(options["fragments"])
        self._rhythm = sync.every, self._num_fragments
        self._delay = delay_of(sync)
        self._coverage = Coverage(parameters)
        self._frozen = FrozenWrites(parameters, world)
        self._buffers, self._world, self._transport = buffers, world, transport
        (self._frame,) = frame_names(sync, 1)
        ordered = [trained[index] for index in expected_order(trained, order)]
        self._fragments = _cut(ordered, self._num_fragments, sync.bucket_bytes, transport.allocate)
        self.buckets = tuple(bucket for fragment in self._fragments for bucket in fragment)
        rate, momentum = outer_values(options)
        self._outer = OuterOptimizer(self.buckets, rate=rate, momentum=momentum)
        transport.arranged(self.buckets)
        self._flights = Flights(transport, world.device, is_beside=self._delay > 0)
        # A tensor, since state that snapshots and checkpoints keep is of tensors.
        self._count = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.num_steps = self.num_exchanges = 0
        self._held_at = 0
        self.overhead_ns = 0

    def arm(self, recorder: Recorder) -> None:
        """The next backward is that of a step of this worker's own; `recorder` is notified of the frames.

        Raises:
            WorkloadError: a parameter requires a gradient now that did not when this was made, or has another
                shape.
        """
        self._coverage.check_frozen()
        for bucket in self.buckets:
            for name, parameter, view in zip(
                bucket.names, bucket.parameters, bucket.views, strict=True
            ):
                check_shape(name, parameter, view)
        if not self.num_steps:  # a script may have loaded parameters since this was made
            self._outer.begin()
            self._frozen.begin()
            note_trained_apart(self, [p for bucket in self.buckets for p in bucket.parameters])
        self._recorder = recorder
        recorder.mark("backward")

    def finish(self) -> None:
        """The optimizer takes this worker's own gradients."""

    def forget_order(self) -> None:
        """Nothing is sent while gradients come."""

    def after_step(self) -> None:
        """Exchange what is due after this step, if anything is, and take what was due some steps before.

        Raises:
            WorkloadError: a buffer changed its shape.
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.

        Cost: On the CPU, blocks until the exchange is over; on GPUs, only the stream waits.
        """
        self.num_steps = self._held_at or self.num_steps + 1
        due = landing = None
        if not self._held_at:
            due = due_fragment(self.num_steps, *self._rhythm)
            landing = landing_fragment(self.num_steps, *self._rhythm, self._delay)
        self._recorder.mark("wait")
        with exchange_frame(self._recorder, self._frame):  # empty in a step without an exchange
            if due is None and landing is None:
                return
            with attendance.meeting(self._frame, self._world):
                if due is not None:
                    self._start(self._fragments[due])
                if landing is not None:
                    self._land(self._fragments[landing])
                    # Buffers and frozen parameters follow once a period, with the last fragment of it.
                    if landing == self._num_fragments - 1:
                        take_buffers(self._buffers, self._world, "data")
                        self._frozen.follow()
                    self.num_exchanges += 1

    def hold(self) -> None:
        """Take steps without an exchange until `release`: for a trial, which is undone, on all workers alike.

        Nothing may be on its way, nor be due before an exchange that starts has ended.
        """
        every, fragments = self._rhythm
        largest = max(range(fragments), key=lambda index: _num_bytes(self._fragments[index]))
        place = -(-(largest + 1) * every // fragments)
        self._held_at = every + place - 1

    def release(self) -> float:
        """Count on, so that the next step starts an exchange; the share of all bytes that it is of."""
        due = due_fragment(self._held_at + 1, *self._rhythm)
        assert due is not None  # `hold` was called
        self._held_at = 0
        # The first two are compared (`CommonState`), most of those in a run are not.
        self.num_exchanges = 2
        return _num_bytes(self._fragments[due]) / max(1, _num_bytes(self.buckets))

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`."""
        self._coverage.check_groups(groups)

    def common(self) -> list[tuple[str, Tensor]]:
        """The common parameters by name: the same bits on all workers at any time."""
        return list(self._outer.common())

    def state_dict(self) -> dict[str, Tensor]:
        """The steps so far, common parameters and outer momentum, what is on its way, the transport's memory.

        Cost: Waits for what is on its way.
        """
        self._count.fill_(self.num_steps)
        self._await(self._on_their_way())
        # What is on its way belongs to the state: without it a run that continues would miss an exchange.
        flying = self._flights.state_dict(self._on_their_way())
        held = {**self._outer.state_dict(), **self._transport.state_dict()}
        return {COUNT: self._count, **held, **flying}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from there; without a count, from the present parameters, which are common to all then.

        Cost: Waits for the device.
        """
        self._await(self.buckets)
        # First, since the count says which fragments are on their way.
        self.num_steps = int(state[COUNT]) if COUNT in state else 0
        self._flights.load_state_dict(state, self._on_their_way())
        self._outer.load_state_dict(state)
        self._transport.load_state_dict(state)

    def close(self) -> None:
        """Release what the transport holds, when nothing is on its way any more."""
        note_trained_apart(self, ())
        try:
            self._await(self.buckets)
        finally:
            self._flights.close()
            self._transport.close()

    def _await(self, buckets: Sequence[Bucket]) -> None:
        """Wait for what is on its way, outside of steps."""
        with attendance.meeting(self._frame, self._world):
            self._flights.wait(buckets)

    def _start(self, buckets: Sequence[Bucket]) -> None:
        """Send how far this worker has come."""
        for bucket in buckets:
            self._outer.difference(bucket, self._transport.scale)
            self._flights.start(bucket)

    def _land(self, buckets: Sequence[Bucket]) -> None:
        """Bring the common parameters on by the mean of the workers' differences; on a CPU, wait."""
        for bucket in buckets:
            self._flights.wait([bucket])
            self._transport.settle(bucket)
            self._outer.update(bucket, is_late=self._delay > 0)

    def _on_their_way(self) -> list[Bucket]:
        found = fragments_on_their_way(self.num_steps, *self._rhythm, self._delay)
        return [bucket for fragment in found for bucket in self._fragments[fragment]]


def _cut(
    parameters: Sequence[Named], num_fragments: int, bucket_bytes: Sequence[int], allocate: Allocate
) -> tuple[tuple[Bucket, ...], ...]:
    """The buckets of each fragment; numbers continue from one fragment to the next."""
    sizes = sizes_of(parameters)
    fragments: list[tuple[Bucket, ...]] = []
    number = 0
    for places in cut_fragments([num_bytes for num_bytes, _ in sizes], num_fragments):
        named = [parameters[place] for place in places]
        cuts = cut_buckets([sizes[place] for place in places], bucket_bytes)
        buckets = tuple(
            Bucket(number + n, [named[i] for i in cut], allocate=allocate)
            for n, cut in enumerate(cuts)
        )
        for bucket in buckets:  # a difference is there of every parameter, used or not
            bucket.arrived, bucket.num_missing = [True] * len(bucket.parameters), 0
        fragments.append(buckets)
        number += len(buckets)
    return tuple(fragments)


def _num_bytes(buckets: Sequence[Bucket]) -> int:
    """Of the parameters in some buckets."""
    return sum(p.nbytes for bucket in buckets for p in bucket.parameters)
