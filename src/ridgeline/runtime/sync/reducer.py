"""The reducer: gradients averaged over workers while backward continues.

Gradients fill flat buckets in the order in which backward makes them ready. When a bucket is full its
exchange starts at once on the communication lane, by the plan's transport; backward continues. Workers start
buckets in the same order, whatever order their own gradients came in. The order is measured in the first
step of each form (on worker 0, whose order all take) and the buckets are cut again by it.

On GPUs a bucket leaves where its gradients are ready, which `departures` knows; and once the order is known,
only the last gradient of a bucket is listened to, until one is not the last (see `hooks`).
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.futures import Future

from ridgeline.capture.ready import Ready
from ridgeline.engine import Engine, Variable
from ridgeline.errors import EngineError
from ridgeline.plan import Sync
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.buckets import hooks
from ridgeline.runtime.sync.buckets.arrangement import agree_on_order, arrange, expected_order
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.buckets.departures import Departures, by_readiness
from ridgeline.runtime.sync.buckets.flags import SharedFlags, UnusedParameters
from ridgeline.runtime.sync.buckets.kept_in_buckets import KeptInBuckets
from ridgeline.runtime.sync.buckets.own_collectives import OwnCollectives
from ridgeline.runtime.sync.buckets.sent_buffers import SentBuffers
from ridgeline.runtime.sync.collectives import Collectives
from ridgeline.runtime.sync.synchronizer import UpdatesAtOnce
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import launch_order, num_held
from ridgeline.workers import attendance
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World


class Reducer(UpdatesAtOnce):
    """Averages the gradients of `parameters` over the world, overlapped with backward; a `Synchronizer`.

    Use: `arm(recorder)` before the backward whose gradients are to be synchronised, `finish()` after it. Then
    every `parameter.grad` is the mean over the workers, or None where no worker used the parameter.

    Args:
        parameters: (name, parameter) of every parameter; those that require gradients now are averaged.
        buffers: Buffers that follow worker 0.
        world: This worker's place; size at least 2.
        engine: Its `communication` lane runs the collectives; closed with this.
        sync: How buckets are cut (see `cut_buckets`), and how their frames are called.
        transport: Makes the mean of each.
        order: Names in the expected ready order; None: reverse order of registration.
        listens: To each gradient, or to the last of a bucket: the latter on GPUs, where buckets leave whole.

    Attributes:
        overhead_ns: Host time spent in here since `arm`, without copies and collective calls.
        knows_order: Whether the order of gradients was measured, and the buckets stay as they are.
        num_held: How many of the last buckets leave when backward is over, in the opposite order.
        own_collectives: Of the model's forward pass; checked by `arm`, before that by whoever sends first.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: FlatBuffers,
        *,
        world: World,
        engine: Engine,
        sync: Sync,
        transport: Transport,
        order: Sequence[str] | None = None,
        listens: Literal["each", "last"] | None = None,
    ) -> None:
        self._parameters = tuple((n, p) for n, p in parameters if p.requires_grad)
        self._coverage = Coverage(parameters)
        self._world = world
        self._engine = engine
        engine.drop_at_exit()  # a step that raised in the middle need not be closed
        self._sync = sync
        self._transport = transport
        self._flags: SharedFlags | None = None
        self._on_device = world.device.type == "cuda"
        self._present = attendance.of(world)
        self._group = world.group("data")
        self._collectives = Collectives(
            engine,
            group=self._group,
            on_device=self._on_device,
            blocks=transport.blocks,
            present=self._present,
        )
        self._buffers = SentBuffers(buffers, world, engine, self._collectives, self._wait)
        is_threaded = transport.blocks and not self._on_device
        self.own_collectives = OwnCollectives(self._group, sync, is_watched=is_threaded)
        self._is_armed = self.knows_order = self._has_failed = self._keeps_order = False
        self._arrivals: list[tuple[Ready | None, int]] = []
        self._departures = Departures(world.device)
        self._unused = UnusedParameters(on_device=self._on_device)
        self._sent: list[hooks.Sent] = []
        self._missing: dict[int, tuple[int, ...]] = {}
        self._is_regular, self.overhead_ns = True, 0
        self._arrange(expected_order(self._parameters, order))
        self._may_skip = listens == "last" or (listens is None and self._on_device)
        self._hooks = hooks.GradientHooks([parameter for _, parameter in self._parameters])
        self._listen_to_each()

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The present buckets, in launch order."""
        return self._layout.buckets

    def clearing(self) -> contextlib.AbstractContextManager[None]:
        """See `Synchronizer`; a forward pass is next."""
        self.own_collectives.begin()
        return super().clearing()

    def arm(self, recorder: Recorder) -> None:
        """The next backward's gradients are to be averaged; `recorder` is notified of the frames.

        Raises:
            WorkloadError: a parameter requires a gradient now that did not when the reducer was made, a
                buffer changed its shape, the last backward pass did not end, or see `OwnCollectives` and
                `KeptInBuckets`.
        """
        self._coverage.check_frozen()
        self.own_collectives.check()
        if self._is_armed:
            raise hooks.unfinished_backward()
        self._recorder = recorder
        self._hooks.stay_last()
        for bucket in self.buckets:
            bucket.reset()
        # The last step's events are waited for already, and a capture must not see events outside it.
        for variable in self._done:
            variable.forget_events()
        if self._skips and any(p.grad is not None for _, p in self._parameters):
            self._listen_to_each()  # whether a gradient has come cannot be seen: it is there already
        self._next = self.overhead_ns = 0
        self._sent.clear()
        self._arrivals.clear()
        if self._kept.are_any():
            self._leave_kept()
        self._collectives.begin(recorder)
        # On a GPU, hearing what the others tell waits; and what is told is known when backward is over.
        self._tells = self._buffers.may_be_written and not (self._on_device and self.knows_order)
        self._num_early = len(self._turns) - self.num_held - self._tells
        self._is_armed = True
        self._departures.begin(self._layout.views)
        self._buffers.begin()
        self._recorder.mark(self._layout.backward_names[0])

    def finish(self) -> None:
        """Launch what is left, wait for all means, and set the gradients.

        Raises:
            WorkloadError: a buffer changed its shape.
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a collective failed otherwise.

        Cost: On the CPU, blocks until the means are there; on GPUs, only the stream waits.
        """
        self.send_rest()
        for bucket in self.buckets:
            self.receive(bucket)
        self.receive_others()
        # Behind all of them: the flags of every bucket may come with the last one.
        for bucket in self.buckets:
            self.settle_unused(bucket)
        self._kept.leave_to_graph()
        if not self.knows_order:
            self._measure_order()

    def send_rest(self) -> None:
        """Backward is over: launch what is left, without waiting for it."""
        self._missing = self._launch_rest()
        self._check_sent()
        self._is_armed = False
        self._departures.end()
        self._buffers.end(is_told=self._tells)
        self._recorder.mark("wait")

    def receive(self, bucket: Bucket) -> None:
        """Wait for the mean of a bucket; raises as `finish` does."""
        self._wait(self._layout.exchange_names[bucket.index], self._done[bucket.index])
        self._transport.settle(bucket)

    def receive_others(self) -> None:
        """Wait for flags and buffers, and note how long took what is over."""
        if self._flags is not None:
            self._flags.settle()
        self._buffers.receive(are_written=self._tells and bool(self._last_early.written))
        self._departures.join()
        self._collectives.record()
        self.overhead_ns += self._collectives.overhead_ns

    def settle_unused(self, bucket: Bucket) -> None:
        """Set the gradients that this worker had none of, as the others' flags say."""
        if positions := self._missing.get(bucket.index):
            self._transport.dropped(bucket, self._unused.settle(bucket, positions))

    def _wait(self, name: str, done: Variable) -> None:
        try:
            self._engine.wait(done)
        except EngineError as error:
            self._has_failed = True
            if self._present is None:
                raise
            self._present.explain(name, error)

    def state_dict(self) -> dict[str, Tensor]:
        """What the transport remembers from step to step."""
        return self._transport.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Have the transport remember this."""
        self._transport.load_state_dict(state)

    def close(self) -> None:
        """Remove the hooks, and close the transport and the engine.

        Raises:
            EngineError: a collective failed, and no step has said so.
        """
        self._hooks.close()
        self._transport.close()
        # Behind an exchange that failed, or a backward pass that raised, others may fail for the same cause.
        errors = (EngineError,) if self._has_failed or self._is_armed else ()
        with contextlib.suppress(*errors):
            self._engine.close()

    def _listen_to_each(self) -> None:
        self._skips = False
        self._hooks.listen({i: partial(self._arrive, i) for i in range(len(self._parameters))})

    def _listen_to_last(self) -> None:
        """The last gradient of a bucket reports all in it; buckets that were not full leave at the end."""
        last = hooks.last_of_each(self._layout.members, [index for _, index in self._arrivals])
        self._skips = True
        self._hooks.listen({i: partial(self._fill, self.buckets[n]) for n, i in last.items()})

    def _arrive(self, index: int, _: Tensor) -> None:
        """A gradient is complete (called by autograd)."""
        if self._is_armed:
            self._take_all((index,))

    def _fill(self, bucket: Bucket, _: Tensor) -> None:
        """The gradient that is the last of its bucket is complete (called by autograd)."""
        if self._is_armed and any(parameter.grad is None for parameter in bucket.parameters):
            self._is_regular = False
        elif self._is_armed:
            self._take_all(self._layout.members[bucket.index])

    def _take_all(self, indices: Sequence[int]) -> None:
        begin = time.perf_counter_ns()
        copying_ns = sum(self._take(index) for index in indices)
        self.overhead_ns += time.perf_counter_ns() - begin - copying_ns
        self._launch_full()

    def _take(self, index: int) -> int:
        """Note a gradient, and on the CPU copy it into its place; nanoseconds spent copying."""
        bucket, position = self._layout.places[index]
        view = bucket.views[position]
        gradient = hooks.fitting(bucket.parameters[position].grad, view, self._parameters[index][0])
        if bucket.arrived[position]:
            raise hooks.second_gradient(self._parameters[index][0])
        told = self._departures.arrive(index, gradient, view)
        if told is not None:
            bucket.ready.append(told)
        if not self.knows_order:
            self._arrivals.append((told, index))
        bucket.arrived[position] = True
        bucket.num_missing -= 1
        if self._on_device:
            return 0
        del gradient  # its memory is given back with the copying: a plain step gives it back, too
        begin = time.perf_counter_ns()
        bucket.store(position, self._transport.scale)
        return time.perf_counter_ns() - begin

    def _launch_rest(self) -> dict[int, tuple[int, ...]]:
        """Launch the buckets that backward left open; the positions it left empty, by bucket."""
        missing = {}
        while self._next < len(self._turns):
            bucket = self._turns[self._next]
            for position, parameter in enumerate(bucket.parameters):
                # No listener, or an earlier micro-batch alone used it: its gradient is as good as any.
                if not bucket.arrived[position] and parameter.grad is not None:
                    self._take(self._layout.members[bucket.index][position])
            # Else the last step's mean, which is still there, would be added to this one's sum.
            positions = missing[bucket.index] = bucket.blank_missing()
            self._launch(bucket, positions)
        return missing

    def _launch_full(self) -> None:
        while self._next < self._num_early and self._turns[self._next].num_missing == 0:
            self._launch(self._turns[self._next], ())

    def _launch(self, bucket: Bucket, missing: Sequence[int]) -> None:
        self._next += 1
        name = self._layout.exchange_names[bucket.index]
        is_last = self._next == len(self.buckets)
        with self._departures.from_where_ready(bucket, is_last=is_last):
            if self._on_device:
                bucket.store_all(missing)
            else:
                bucket.raise_flags(missing)
            if self._tells and bucket is self._last_early and self._buffers.are_written:
                bucket.written.fill_(1)
            self._recorder.mark(self._layout.backward_names[self._next])
            exchange = partial(self._exchange, bucket, is_last=is_last)
            self._collectives.run(name, exchange, self._done[bucket.index])
        if self._skips:
            # After the launch: the collective is a write of its own, which changes the bucket's version.
            self._sent.append(hooks.Sent(bucket))

    def _exchange(self, bucket: Bucket, *, is_last: bool) -> "Future[Any] | None":
        """Start the mean of a bucket; the flags of all go with the last."""
        future = self._transport.reduce(bucket)
        if not is_last or self._flags is None:
            return future
        told = self._flags.exchange(waits=not self._on_device)
        started = [one for one in (future, told) if one is not None]
        return torch.futures.collect_all(started) if started else None

    def _check_sent(self) -> None:
        """Where not every gradient is listened to, see that none came after its bucket was sent."""
        for bucket, sent in zip(self._turns, self._sent, strict=False):
            if sent.has_changed():
                raise hooks.second_gradient(f"one of {', '.join(bucket.names)}")
        if self._skips and not self._is_regular:
            self._listen_to_each()  # the order changes from step to step

    def forget_order(self) -> None:
        """The next backward pass is that of another form of the step: its order is measured."""
        self.knows_order = self._keeps_order = False
        self._listen_to_each()

    def order(self) -> tuple[str, ...]:
        """See `Synchronizer`."""
        return tuple(self._parameters[i][0] for i in self._layout.order) if self.knows_order else ()

    def take_order(self, names: Sequence[str]) -> None:
        """See `Synchronizer`."""
        self._keeps_order = True
        self._arrange(expected_order(self._parameters, names))

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`."""
        self._coverage.check_groups(groups)

    def _measure_order(self) -> None:
        """Take worker 0's order for all, and cut the buckets again if it is news."""
        self.knows_order = True
        if not self._keeps_order:
            order = agree_on_order(by_readiness(self._arrivals), self._layout.order, self._world)
            if order != list(self._layout.order):
                self._arrange(order)
        if self._may_skip:
            self._listen_to_last()

    def _leave_kept(self) -> None:
        """Leave gradients that a script keeps their memory: buckets are in other memory from now on."""
        said = self.buckets[0].sent_signals
        self._arrange(self._layout.order)
        self.buckets[0].sent_signals.copy_(said)
        if self._skips:
            self._listen_to_each()

    def _arrange(self, order: Sequence[int]) -> None:
        self._layout = arrange(
            self._parameters,
            order,
            self._sync,
            workers=max(2, self._world.size),  # one who joined a training is in a group by itself
            has_buffers=self._buffers.are_any,
            allocate=self._transport.allocate,
        )
        self.num_held = num_held(self._sync, len(self.buckets))
        self._turns = [self.buckets[n] for n in launch_order(len(self.buckets), self.num_held)]
        self._last_early = self._turns[len(self._turns) - self.num_held - 1]
        self._transport.arranged(self.buckets)
        if not self._transport.carries_flags:
            self._flags = SharedFlags(self.buckets, self._group)
        self._done = [self._engine.variable(bucket.names[0]) for bucket in self.buckets]
        self._buffers.arrange()
        self._next = 0
        self._kept = KeptInBuckets(self.buckets, is_shared=self._transport.shares_memory)
