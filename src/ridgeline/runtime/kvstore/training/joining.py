"""How a step joins others whose parameters a store updates, from the beginning or while they train."""

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from ridgeline.engine import Engine
from ridgeline.errors import PlanError
from ridgeline.plan import Plan
from ridgeline.runtime.kvstore.serving.joining.members import found
from ridgeline.runtime.kvstore.training.synchronizer import StoreUpdate
from ridgeline.runtime.kvstore.training.transport import StoreTransport
from ridgeline.runtime.layout.same_state import check_same_state
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.joining import NO_GRADIENTS, Joined, StateWatch, lanes_for
from ridgeline.runtime.sync.late_hooks import check_step_is_plain
from ridgeline.runtime.sync.loading import make_transport
from ridgeline.runtime.sync.outside_writes import OutsideWrites
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.sparse.sparse_gradients import dense_parameters, sparse_parameters
from ridgeline.synchronisation import values_of
from ridgeline.synchronisation.serving import STALENESS
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import JOIN, World

_WHILE = "whose updates are made while gradients come"


def join_store(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    order: Sequence[str] | None = None,
    notes: list[str] | None = None,
) -> Joined:
    """Make what has a store update the parameters; see `sync.joining.join_others`.

    Raises:
        WorkloadError: the optimizer has parameters that are not the model's, hooks before its step, or
            another method in place of it; what it remembers was left in the store of a closed step; or a
            buffer cannot be sent.
        PlanError: workers do not wait for each other, and are not all of the job; or this worker joins those
            of another plan.
        KVStoreError: a server does not start, the workers are on several hosts without keys, or there is no
            training to join.
    """
    optimizer.state_dict()  # raises where a store has it
    check_step_is_plain(optimizer, plan.sync.algorithm, _WHILE)
    # All that may refuse comes before a store is started, and before hooks that would stay on parameters.
    Coverage([*model.named_parameters()]).check_groups(optimizer.param_groups)
    trained = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    parameters = {name: p for name, p in model.named_parameters() if p in trained}
    sparse = {name: p for name, p in sparse_parameters(model).items() if p in trained}
    if world.joins:
        check_joined(plan, world.joins)
    transport = make_transport(plan.sync, world)
    assert isinstance(transport, StoreTransport)  # entries name both
    reducer = Reducer(
        dense_parameters(parameters.items(), sparse, world.device),
        # Whose workers need not wait for each other have buffers of their own.
        FlatBuffers(model if transport.waits else nn.Module()),
        world=world,
        engine=Engine(lanes=lanes_for(transport, world)),
        sync=plan.sync,
        transport=transport,
        order=order,
    )
    synchronizer = StoreUpdate(
        model,
        optimizer,
        reducer=reducer,
        transport=transport,
        parameters=parameters,
        sparse=sparse,
        world=world,
    )
    if notes is not None:
        notes.append(NO_GRADIENTS)
    if not transport.waits:
        if notes is not None:
            notes += _notes(transport)
        watch: StateWatch = SameBeginning(model, optimizer, world)
        if world.joins:
            watch = TakesPart(synchronizer)
        return Joined(synchronizer, watch, lambda: transport.store.outages)
    watch = OutsideWrites(model, optimizer, reducer, world)
    synchronizer.when_exchanged = watch.hear
    return Joined(synchronizer, watch)


class SameBeginning:
    """Workers that do not wait for each other begin with the same, and are not compared afterwards.

    Args:
        model: Its parameters and buffers.
        optimizer: Its state and settings.
        world: This worker's place; size at least 2.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, world: World) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._is_first = True

    def before_step(self) -> None:
        """A step begins.

        Raises:
            WorkloadError: it is the first one, and the workers hold different state.
        """
        if self._is_first:
            check_same_state(self._model, self._optimizer, self._world, when="at its first step")
        self._is_first = False

    def after_step(self) -> None:
        """Nothing is compared."""


class TakesPart:
    """A worker that joins continues from what the others have come to, and is not compared with them.

    Args:
        synchronizer: Has the store of the training that it joins.
    """

    def __init__(self, synchronizer: StoreUpdate) -> None:
        self._synchronizer = synchronizer
        self._is_first = True

    def before_step(self) -> None:
        """A step begins: the first one with the parameters as they are there.

        Raises:
            KVStoreError: they could not be read.
        """
        if self._is_first:
            self._synchronizer.take_part()
        self._is_first = False

    def after_step(self) -> None:
        """Nothing is compared."""


def check_joined(plan: Plan, address: str) -> None:
    """Wait for the first step of the training that is joined, and see that it is by the same plan.

    Args:
        plan: Of this worker.
        address: Of that training.

    Raises:
        KVStoreError: no training is there, or its first step takes long.
        PlanError: it has another number of workers, or another bound.
    """
    members = found(address)
    # The first step gives the store its values, which one who joins earlier would not find.
    members.await_training()
    bound = int(values_of(plan.sync)[STALENESS.name])
    mine = (plan.workers, None if bound < 0 else bound)
    its = (members.record.num_workers, members.record.staleness)
    if mine != its:
        workers, staleness = its
        raise PlanError(
            f"wanted workers={workers} and sync.options[{STALENESS.name!r}]="
            f"{-1 if staleness is None else staleness} in the plan, as in that of the training at {address}, "
            f"got {plan.workers} and {bound}; give the plan of that training"
        )


def _notes(transport: StoreTransport) -> list[str]:
    """What holds for workers whose parameters are in servers, and how others join them."""
    store, joins = transport.store, transport.world.joins
    if joins:
        came = (
            f"takes part as worker {store.rank} in a training at {joins} that {store.num_workers} workers "
            "began; each push counts for as much as one of theirs"
        )
        return [_note(transport), came]
    told = f"other processes join by {JOIN}={store.address} and this plan"
    return [_note(transport), *([told] if store.address else [])]


def _note(transport: StoreTransport) -> str:
    """What holds for workers whose parameters are in servers."""
    bound = transport.bound
    if bound < 0:
        pace = "workers do not wait for each other"
    else:
        pace = f"a worker waits for others that are more than {bound} pushes behind"
    told = f"{pace}, and each has parameters and buffers of its own between steps"
    if transport.adds_up:
        return f"{told}; updates are by the mean of their gradients"
    return (
        f"{told}; each push is an update, at 1/{transport.store.num_workers} of the learning rate, so that a "
        "push of each moves parameters as far as one by the mean"
    )
