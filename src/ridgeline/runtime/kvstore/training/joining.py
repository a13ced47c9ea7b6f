"""How a step joins others whose parameters a store updates, from the beginning or while they train."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn
from torch.optim import Optimizer

from ridgeline.engine import Engine
from ridgeline.errors import PlanError
from ridgeline.optimizers.groups import parameters_of
from ridgeline.plan import Plan
from ridgeline.runtime.kvstore.serving.joining.members import found
from ridgeline.runtime.kvstore.training.synchronizer import StoreUpdate
from ridgeline.runtime.kvstore.training.transport import StoreTransport
from ridgeline.runtime.layout.same_state import check_same_state
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.joining import NO_GRADIENTS, Joined, lanes_for
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
    check_plain = partial(check_step_is_plain, optimizer, plan.sync.algorithm, _WHILE)
    check_plain()
    # All that may refuse comes before a store is started, and before hooks that would stay on parameters.
    Coverage([*model.named_parameters()]).check_groups(optimizer.param_groups)
    trained = {p for p in parameters_of(optimizer) if p.requires_grad}
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
        check_plain=check_plain,
    )
    if notes is not None:
        notes.append(NO_GRADIENTS)
    if not transport.waits:
        if notes is not None:
            notes += _notes(transport)
        alike = partial(check_same_state, model, optimizer, world, when="at its first step")
        first = FirstStep(synchronizer.take_part if world.joins else alike)
        return Joined(synchronizer, first, lambda: transport.store.outages)
    watch = OutsideWrites(model, optimizer, reducer, world)
    synchronizer.when_exchanged = watch.hear
    return Joined(synchronizer, watch)


class FirstStep:
    """Has something done before the first step; workers are not compared afterwards.

    Those that do not wait for each other begin with the same; one that joins with what the others have come
    to.
    """

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def before_step(self) -> None:
        """A step begins.

        Raises:
            WorkloadError, KVStoreError: the workers hold different state, or it could not be read; what the
                action raises.
        """
        if self._action is not None:
            self._action()
        self._action = None

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
    store, joins, bound = transport.store, transport.world.joins, transport.bound
    if bound < 0:
        pace = "workers do not wait for each other"
    else:
        pace = f"a worker waits for others that are more than {bound} pushes behind"
    pace += ", and each has parameters and buffers of its own between steps"
    if transport.adds_up:
        update = "updates are by the mean of their gradients"
    else:
        update = (
            f"each push is an update, at 1/{store.num_workers} of the learning rate, so that a push of each "
            "moves parameters as far as one by the mean"
        )
    notes = [f"{pace}; {update}"]
    if joins:
        notes.append(
            f"takes part as worker {store.rank} in a training at {joins} that {store.num_workers} workers "
            "began; each push counts for as much as one of theirs"
        )
    elif store.address:
        notes.append(f"other processes join by {JOIN}={store.address} and this plan")
    return notes
