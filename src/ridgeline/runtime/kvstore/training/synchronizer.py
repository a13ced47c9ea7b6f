"""A store in place of the optimizer: gradients are pushed during backward, parameters pulled back.

Buckets leave as under any transport (see `sync.reducer`), and come back as the parameters that the store
has updated (see `transport`). The user's own optimizer finds no gradients, so its step changes nothing; its
settings are followed, and so are schedules of them. What it remembers is the store's from the first step on:
state that was loaded into it, at any time, is moved there at the next step, as are parameters that a script
wrote.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ridgeline.errors import WorkloadError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.recording.recorder import Recorder
from ridgeline.runtime.checkpoints.checkpointing import UNSAVED
from ridgeline.runtime.kvstore.arguments import Key
from ridgeline.runtime.kvstore.state_files import of_keys, to_keys
from ridgeline.runtime.kvstore.training.settings import settings_of
from ridgeline.runtime.kvstore.training.sparse import StoredSparseGradients
from ridgeline.runtime.kvstore.training.transport import StoreTransport
from ridgeline.runtime.kvstore.updaters import (
    OptimizerUpdater,
    SetOptimizer,
    as_number,
    as_tensor,
)
from ridgeline.runtime.sync.around_reducer import AroundReducer
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.late_hooks import LateHooks
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.refused_copies import allow_copies, refuse_copies
from ridgeline.runtime.sync.synchronizer import STATE_PHASE
from ridgeline.runtime.sync.watched_state import state_elsewhere, unwatch_state, watch_state
from ridgeline.workers import attendance
from ridgeline.workers.local_writes import LocalWrites
from ridgeline.workers.world import World

_TRAINED = f"{UNSAVED}trained"
"""Is among what a worker shows that has trained through its store."""


class StoreUpdate(AroundReducer):
    """Has a store update the parameters; a `Synchronizer`.

    Workers who do not wait for each other meet before their state is taken, so none trains apart.

    Args:
        model: Its parameters and the optimizer's are watched for what scripts write.
        optimizer: One of torch's, whose settings are followed.
        reducer: Exchanges dense gradients by `transport`.
        transport: Has the store.
        parameters: Those that the store updates, by key.
        sparse: Those of them whose gradients are rows.
        world: This worker's place; size at least 2.
        check_plain: Refuses an optimizer whose step is not that of its class.

    Attributes:
        overhead_ns: Host time spent since `arm`, without copies and collective calls.
        when_exchanged: Called when gradients were exchanged, before parameters change.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        reducer: Reducer,
        transport: StoreTransport,
        parameters: Mapping[str, nn.Parameter],
        sparse: Mapping[str, nn.Parameter],
        world: World,
        check_plain: Callable[[], object],
    ) -> None:
        super().__init__(reducer)
        self._check_plain = check_plain
        self._optimizer, self._transport = optimizer, transport
        self._store, self._world = transport.store, world
        self._parameters = dict(parameters)
        self._names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        self._dense = {name: p for name, p in parameters.items() if name not in sparse}
        self._sparse = StoredSparseGradients(sparse, transport)
        self._coverage = Coverage([*model.named_parameters()])
        self._writes = LocalWrites(model, optimizer)
        self._updated: list[tuple[Tensor, Tensor]] = []
        # As of the last step; what a script writes makes a parameter differ from it.
        self._known: list[tuple[Tensor, Tensor]] = []
        self._settings: SetOptimizer | None = None
        self._late = LateHooks(optimizer)
        self._is_filled = self._has_states = self._is_shown = self._is_told = False
        self._is_stepping = False
        self.when_exchanged: Callable[[], None] = lambda: None
        self._hook: RemovableHandle | None = optimizer.register_state_dict_pre_hook(self._refuse)
        refuse_copies(optimizer, self._refuse)

    def take_part(self) -> None:
        """Continue from what the workers of a training that runs have come to, in this worker's first step.

        What this worker's own optimizer remembers is dropped: the store's continues.

        Raises:
            KVStoreError: the store has no such parameters, or there was no moment to read them.
        """
        self._transport.take_part(self._parameters)
        for parameter in self._parameters.values():
            # Else it would be taken for loaded state, and moved into the store over theirs.
            self._optimizer.state.pop(parameter, None)
        self._is_filled = self._has_states = self._is_told = True
        self._writes.note()

    def arm(self, recorder: Recorder) -> None:
        """The next backward's gradients are to be pushed; `recorder` is notified of the frames.

        Raises:
            WorkloadError: a script wrote parameters or loaded the optimizer, and workers do not wait for each
                other; see also `Reducer.arm`.
            KVStoreError: the optimizer refuses its settings.

        Cost: Reads all parameters and what the store has of them.
        """
        begin = time.perf_counter_ns()
        self._reducer.own_collectives.check()  # before the store's first values are agreed on
        if not self._is_filled:
            self._fill()
        elif self._writes.found() or self._is_written():
            self._take_writes()
        else:
            self._follow_settings()
        self._is_stepping = True
        # The last step may have failed in its update.
        self._updated.clear()
        self._late.drop()
        self._arming_ns = time.perf_counter_ns() - begin
        super().arm(recorder)

    def finish(self) -> None:
        """Wait for the updated parameters, and leave no gradient to the optimizer.

        Raises:
            WorkloadError: the workers hold different state; see also `Reducer.finish`.
            EngineError: a push failed, or the update by it.
        """
        self._reducer.finish()
        self.when_exchanged()
        begin = time.perf_counter_ns()
        for name, parameter in self._dense.items():
            place = parameter.grad  # in a bucket, which may have been cut again since
            if place is not None:  # else no worker has used it
                self._updated.append((parameter, self._store.updated(name, place)))
                parameter.grad = None
        self._sparse.take()
        self._has_states = True
        self._late.hold()
        own_ns = time.perf_counter_ns() - begin + self._arming_ns
        self.overhead_ns = self._reducer.overhead_ns + own_ns

    def after_step(self) -> None:
        """Bring the updated values into the parameters.

        Raises:
            AbsentWorkerError: a collective failed, since another worker did not come to it; names it.
            EngineError: a push of sparse rows failed, or the update by it.

        Cost: A copy of the parameters; pushes and pulls sparse rows, and waits.
        """
        with torch.no_grad():
            if self._updated:
                places, values = zip(*self._updated, strict=True)
                torch._foreach_copy_(list(places), list(values))
            self._known, self._updated = self._updated, list[tuple[Tensor, Tensor]]()
            with attendance.meeting("the exchange of sparse rows", self._world):
                self._sparse.exchange()
        watch_state(self._optimizer, self._look)
        self._is_stepping = False
        self._writes.note()
        if not self._is_told:  # which parameters anybody uses is known then
            self._store.say_it_trains()
            self._is_told = True
        self._late.call()

    def check_covers(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """See that the store updates all parameters of an optimizer.

        Args:
            groups: Its `param_groups`.

        Raises:
            WorkloadError: one is not among those that it was made for or is missing, a parameter requires a
                gradient now that did not then, or the optimizer has hooks or another method since.
        """
        self._check_plain()
        self._coverage.check_frozen()
        self._coverage.check_groups(groups)
        held = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in self._parameters.items():
            if id(parameter) not in held:
                raise WorkloadError(
                    "wanted an optimizer of the parameters that it had when the step was made, got one "
                    f"without {name}, which the store would still update; make the step again after removing "
                    "parameters, or freeze them"
                )
        for group in groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._names:
                    raise WorkloadError(
                        "wanted an optimizer of the parameters that it had when the step was made, got one "
                        f"more, of shape {tuple(parameter.shape)}, of which the store has no value; make the "
                        "step again after adding parameters"
                    )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's `state_dict()` with what the store remembers, on the first worker; others get none.

        All workers call this, between two steps. Tensors are on the CPU.

        Raises:
            AbsentWorkerError: another worker did not call it; names it.
            KVStoreError: the optimizer keeps something that is no tensor.

        Cost: What is remembered, sent to the first worker.
        """
        if not self._has_states:
            return optimizer.state_dict()
        with attendance.phase(STATE_PHASE, self._world):
            self._meet()
            states = self._store.optimizer_states()
            if not self._transport.waits:
                self._store.barrier()  # none pushes before all is read
        self._is_shown = True
        try:
            told = optimizer.state_dict()
        finally:
            self._is_shown = False
        held = parameters_of(optimizer)
        found = {
            number: {entry: as_number(tensor) for entry, tensor in states[name].items()}
            for number, name in enumerate(self._names.get(p) for p in held)
            if name in states
        }
        # Of frozen parameters the optimizer may remember something itself.
        return {**told, "state": {} if self._store.rank else {**told["state"], **found}}

    def state_dict(self) -> dict[str, Tensor]:
        """What is remembered of the parts that this worker updates, for who undoes steps; see `UNSAVED`.

        Workers who do not wait for each other meet, and all have the same parameters then.
        """
        if not self._has_states:
            return {}
        self._meet()
        if not self._transport.waits:
            return {}
        own = of_keys(self._store.own_states())
        return {_TRAINED: torch.ones(1, device="cpu"), **{f"{UNSAVED}{n}": own[n] for n in own}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the parameters and the optimizer's state as they are, and with this.

        Raises:
            WorkloadError: workers who do not wait for each other have trained since the step was made.
        """
        if self._is_filled and not self._transport.waits:
            raise _fixed()
        own = {n.removeprefix(UNSAVED): t for n, t in state.items() if n.startswith(UNSAVED)}
        # Said by all workers alike: one may serve no key of a small model.
        was_trained = own.pop(_TRAINED.removeprefix(UNSAVED), None) is not None
        if self._is_filled:
            self._store.put_back(self._parameters)
            self._store.forget()
            self._load_states()
            self._store.load_own_states(to_keys(own))
            self._has_states = self._has_states or was_trained
            self._known.clear()
            self._writes.note()

    def close(self) -> None:
        """Release what is held. What the store remembers is lost, and the optimizer refuses to continue."""
        self._late.drop()
        self._is_stepping = False
        if self._hook is not None and not self._has_states:
            self._hook.remove()
            allow_copies(self._optimizer)
            unwatch_state(self._optimizer, self._look)
        elif self._hook is not None:
            # A later step would begin again without momenta, and nobody would be told.
            self._optimizer.register_step_pre_hook(self._refuse)
        self._hook = None
        super().close()

    def _fill(self) -> None:
        """Give the store its first values, and what the optimizer remembers."""
        with attendance.meeting("the first values of the store", self._world):
            self._follow_settings()
            self._store.init([*self._parameters], [*self._parameters.values()])
            self._is_filled = True
            self._load_states()
            if not self._transport.waits:
                self._store.barrier()  # none pushes before all is there
        self._writes.note()

    def _is_written(self) -> bool:
        """Whether a parameter is not what it was updated to: no counter reports a write through `.data`."""
        return any(not (torch.equal(p, value) or p.isnan().any()) for p, value in self._known)

    def _take_writes(self) -> None:
        """Have the store continue from what a script wrote, which is the same on all workers."""
        if not self._transport.waits:
            raise _fixed()
        self._store.put_back(self._parameters)
        if self._writes.is_loaded():
            self._store.forget()
            self._load_states()
        self._follow_settings()
        self._writes.note()

    def _load_states(self) -> None:
        """Move what the optimizer remembers of the store's parameters into the store."""
        held = self._optimizer.state
        mine = [(p, name) for p, name in self._names.items() if dict.__contains__(held, p)]
        found = {name: dict.pop(held, p) for p, name in mine}
        told = {name: _tensors(state) for name, state in found.items()}
        states: dict[Key, dict[str, Any]] = {name: state for name, state in told.items() if state}
        if states:
            self._store.load_states(states)
        self._has_states = bool(states)

    def _follow_settings(self) -> None:
        """Have the store update as the optimizer's groups say; the first worker sends that to all servers."""
        # One worker sends them, so that servers hear of one setting and not of each worker's, some of them
        # late.
        if self._is_filled and not self._transport.waits and self._store.rank:
            return
        share = 1.0 if self._transport.adds_up else 1.0 / self._store.num_workers
        now = settings_of(
            self._optimizer, self._names, rescale=self._transport.rescale, share=share
        )
        if now != self._settings:
            self._store.use(OptimizerUpdater(now))
            self._settings = now

    def _meet(self) -> None:
        """Have all workers come to what all have pushed, where they do not in each step."""
        if self._transport.waits:
            return
        self._store.barrier()
        self._store.pull([*self._parameters], [*self._parameters.values()])
        self._store.barrier()  # none pushes before all have pulled
        self._known.clear()
        self._writes.note()

    def _look(self, key: Any, *, writes: bool = False) -> None:
        """Refuse to show, or to have set, what the store remembers."""
        may_look = self._is_stepping or self._is_shown or not self._has_states
        if not may_look and (key is None or key in self._names):
            raise state_elsewhere(self._optimizer, "in a store")

    def _refuse(self, optimizer: Optimizer, *_: Any) -> None:
        """Refuse to take what the optimizer itself remembers for what the store does."""
        if self._has_states and not self._is_shown and not self._writes.is_loaded():
            raise WorkloadError(
                f"wanted the state of {type(optimizer).__name__}, got that of an optimizer whose updates a "
                "store makes; call step.optimizer_state() on all workers before the step is closed: the "
                "first one gets all of it, for load_state_dict"
            )


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is remembered of a parameter; momenta that are still to come are None."""
    return {entry: as_tensor(value) for entry, value in state.items() if value is not None}


def _fixed() -> WorkloadError:
    return WorkloadError(
        "wanted parameters and optimizer as the servers left them between two steps, got others, which they "
        "do not take; write and load before the first step, or make the step again"
    )
