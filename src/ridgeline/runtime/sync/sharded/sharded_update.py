"""Each worker updates its part of the parameters alone, and keeps the optimizer's state of it alone.

Gradients leave as under any transport (see `reducer`), but a worker gets the mean of its part of each bucket
alone. Between backward and the end of the update the optimizer's groups hold the worker's parts (see `parts`)
in place of the parameters, so the user's own optimizer updates these, with the settings of their groups, and
remembers what it remembers by part. Then all workers gather the updated parts.

Anything else sees the optimizer as it was made: groups of whole parameters. State that was loaded for these,
at any time, is cut to the parts at the next update. The state of all parts as one is `optimizer_state`.

Parts are cut through the middle of parameters, so they are equal whatever the model is, and a bucket needs
one reduce-scatter. That wants optimizers that update each element by itself. torch's ZeroRedundancyOptimizer
gives whole parameters to workers instead, wants its own optimizer in place of the user's, and all-reduces.

Source: Rajbhandari et al., "ZeRO", SC 2020, stage 1.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.sync.around_reducer import AroundReducer
from ridgeline.runtime.sync.buckets.buckets import Bucket
from ridgeline.runtime.sync.collectives import exchange_frame
from ridgeline.runtime.sync.late_hooks import LateHooks, check_step_is_plain
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.refused_copies import allow_copies, refuse_copies
from ridgeline.runtime.sync.sharded.sharded_state import (
    cut_state,
    has_shards,
    refuse_shards,
    whole_state,
)
from ridgeline.runtime.sync.sharded.shards import ParameterShard, check_dense, make_shards
from ridgeline.runtime.sync.synchronizer import STATE_PHASE
from ridgeline.runtime.sync.transports.sharded import Sharded
from ridgeline.runtime.sync.watched_state import state_elsewhere, unwatch_state, watch_state
from ridgeline.synchronisation import GATHERING
from ridgeline.workers import attendance
from ridgeline.workers.world import World

_PARTS = "which would find the gradients of this worker's part of the parameters"

_left: weakref.WeakKeyDictionary[Optimizer, tuple[RemovableHandle, ...]] = (
    weakref.WeakKeyDictionary()
)
"""What closed steps have left on optimizers to refuse the state of one worker's parts."""


class ShardedUpdate(AroundReducer):
    """Exchanges gradients in every step, and the parameters that they have updated; a `Synchronizer`.

    Args:
        optimizer: Of all parameters that are trained; see `check_can_shard`.
        reducer: Averages gradients by `transport`.
        transport: Gives each worker the mean of its part.
        world: This worker's place; size at least 2.
        algorithm: Of the plan, for messages.

    Attributes:
        overhead_ns: Host time spent since `arm`, without copies and collective calls.
        when_exchanged: Called when gradients were exchanged, before parameters change.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        reducer: Reducer,
        transport: Sharded,
        world: World,
        algorithm: str,
    ) -> None:
        super().__init__(reducer)
        self._optimizer, self._transport, self._world = optimizer, transport, world
        self._algorithm = algorithm
        self._shards: dict[nn.Parameter, ParameterShard] = {}
        self._whole: list[list[Any]] = []
        self._is_stepping = False
        self._late = LateHooks(optimizer)
        self.when_exchanged: Callable[[], None] = lambda: None
        # Its state is whole again, and is to be cut to the parts of this step.
        for left in _left.pop(optimizer, ()):
            left.remove()
        # A script's own `optimizer.state_dict()` would save this worker's part as if it were all.
        self._hook: RemovableHandle | None = optimizer.register_state_dict_pre_hook(refuse_shards)
        refuse_copies(optimizer, refuse_shards)

    def arm(self, recorder: Recorder) -> None:
        """See `Reducer`; this step may look for what the optimizer remembers."""
        self._is_stepping = True
        super().arm(recorder)

    def finish(self) -> None:
        """Wait for the means, and have the optimizer find this worker's parts and their gradients.

        Raises:
            WorkloadError: a parameter was moved since the first step, or the workers hold different state;
                see also `Reducer.finish`.
        """
        self._reducer.finish()
        self.when_exchanged()
        begin = time.perf_counter_ns()
        if not self._shards:
            # The first step has measured the order of gradients: from here on buckets are as they are.
            self._shards = make_shards(self.buckets, self._transport.rank, self._transport.size)
            self._transport.has_settled = True
        for shard in self._shards.values():
            _take_gradient(shard)
        cut_state(self._optimizer, self._shards)
        watch_state(self._optimizer, self._look)
        self._show_parts()
        self._late.hold()
        self.overhead_ns = self._reducer.overhead_ns + time.perf_counter_ns() - begin

    def after_step(self) -> None:
        """Bring the updated parts to all workers.

        Raises:
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.

        Cost: On the CPU, blocks until they are there; on GPUs, only the stream waits.
        """
        self._show_whole()
        self._recorder.mark("wait")
        together = attendance.meeting(GATHERING, self._world)
        with exchange_frame(self._recorder, GATHERING), torch.no_grad(), together:
            for bucket in self.buckets:
                self._gather(bucket)
        self._is_stepping = False
        self._late.call()

    def forget_order(self) -> None:
        """Keeps the order: each worker has its parts of the buckets as they are."""

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `Synchronizer`.

        Raises:
            WorkloadError: the optimizer has hooks before its step, or another method in place of it; see also
                `Reducer.check_covers`.
        """
        # The last step may have failed in its update.
        self._show_whole()
        self._late.drop()
        check_step_is_plain(self._optimizer, self._algorithm, _PARTS)
        super().check_covers(groups)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's `state_dict()` of all parts as one, on the first worker; others get no state.

        All workers call this, between two steps. Tensors are on the CPU.

        Raises:
            AbsentWorkerError: another worker did not call it; names it.

        Cost: A small exchange, and one gathering to the first worker for each kind of state and bucket, of
            which it holds one at a time on its device. Waits for the device.
        """
        with attendance.phase(STATE_PHASE, self._world):
            return whole_state(optimizer, self._shards, self.buckets, self._world)

    def close(self) -> None:
        """Release what is held. The optimizer's state stays in parts, and it refuses to show or to use it."""
        self._show_whole()
        self._late.drop()
        self._is_stepping = False
        if self._hook is not None and not has_shards(self._optimizer):
            self._hook.remove()
            allow_copies(self._optimizer)
            unwatch_state(self._optimizer, self._look)
        elif self._hook is not None:
            step_hook = self._optimizer.register_step_pre_hook(_refuse_step)
            _left[self._optimizer] = (self._hook, step_hook)
        self._hook = None
        super().close()

    def _look(self, key: Any, *, writes: bool = False) -> None:
        """Refuse to show what is remembered of a parameter; what is set is cut to parts in the next step."""
        if self._is_stepping or writes:
            return
        if key in self._shards or (key is None and has_shards(self._optimizer)):
            raise state_elsewhere(self._optimizer, "in the parts of all workers")

    def _show_parts(self) -> None:
        """Have the groups hold this worker's parts; of what it has none, the whole, without a gradient."""
        for group in self._optimizer.param_groups:
            self._whole.append(group["params"])
            group["params"] = [self._shown(parameter) for parameter in group["params"]]

    def _shown(self, parameter: nn.Parameter) -> nn.Parameter:
        shard = self._shards.get(parameter)
        return parameter if shard is None or shard.part is None else shard.part

    def _show_whole(self) -> None:
        """Have the groups hold what they held before, the very same lists."""
        if not self._whole:
            return
        for group, parameters in zip(self._optimizer.param_groups, self._whole, strict=True):
            group["params"] = parameters
        self._whole.clear()
        for shard in self._shards.values():
            if shard.part is not None:
                shard.part.grad = None

    def _gather(self, bucket: Bucket) -> None:
        """Bring the updated parameters of a bucket to all, by its payload: the gradients are used."""
        members = [self._shards[parameter] for parameter in bucket.parameters]
        pairs = [
            (shard.of(bucket.views[shard.position]), shard.part)
            for shard in members
            if shard.part is not None
        ]
        # The payload is free: its gradients were used by the update.
        _copy(pairs)
        self._transport.gather(bucket.payload)
        _copy([(p.detach(), view) for p, view in zip(bucket.parameters, bucket.views, strict=True)])


def _refuse_step(optimizer: Optimizer, *_: Any) -> None:
    refuse_shards(optimizer)


def _take_gradient(shard: ParameterShard) -> None:
    """Give a part the mean of its gradient; the parameter itself has none from here on."""
    parameter, part = shard.parameter, shard.part
    if parameter.data_ptr() != shard.address:
        raise WorkloadError(
            "wanted the parameters where they were in memory when the step was made, got one of shape "
            f"{tuple(parameter.shape)} that was moved; write into it in place, or make the step again"
        )
    gradient = parameter.grad
    if part is not None:
        part.grad = None if gradient is None else shard.of(gradient)
    parameter.grad = None


def _copy(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    """Copy the second of each pair into the first."""
    if pairs:
        places, values = zip(*pairs, strict=True)
        torch._foreach_copy_(list(places), list(values))


def check_can_shard(
    parameters: Sequence[tuple[str, nn.Parameter]], optimizer: Optimizer, algorithm: str
) -> None:
    """See that an optimizer's update can be divided among workers.

    Args:
        parameters: (name, parameter) of all that are trained.
        optimizer: That of the step.
        algorithm: Of the plan, for messages.

    Raises:
        WorkloadError: a parameter is not the optimizer's, or has gaps in its memory; or the optimizer has the
            state of parts from an earlier step, hooks before its step, or another method in place of it.
    """
    refuse_shards(optimizer)
    check_step_is_plain(optimizer, algorithm, _PARTS)
    check_dense(parameters, algorithm)
    known = {*parameters_of(optimizer)}
    for name, parameter in parameters:
        if parameter not in known:
            raise WorkloadError(
                f"wanted all trained parameters in the optimizer for sync.algorithm={algorithm!r}, got "
                f"{type(optimizer).__name__} without {name}, of which no worker has the whole gradient; give "
                "it to the optimizer, freeze it, or use another algorithm"
            )
