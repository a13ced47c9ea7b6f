"""How a step joins the other workers: by the synchronizer of its plan, and the watch that goes with it."""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.engine import Engine
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.engine.lanes.streams import StreamLane
from ridgeline.engine.task import Finish, LaneRunner
from ridgeline.errors import WorkloadError
from ridgeline.history import Outage
from ridgeline.plan import Plan, Sync
from ridgeline.runtime.sync.buckets.coverage import Coverage
from ridgeline.runtime.sync.held_update import HeldUpdate, HeldWatch, check_can_hold
from ridgeline.runtime.sync.loading import load, make_transport
from ridgeline.runtime.sync.local.common_state import CommonState
from ridgeline.runtime.sync.local.local_steps import LocalSteps
from ridgeline.runtime.sync.outside_writes import OutsideWrites
from ridgeline.runtime.sync.reducer import Reducer
from ridgeline.runtime.sync.sharded.sharded_update import ShardedUpdate, check_can_shard
from ridgeline.runtime.sync.sparse.sparse_exchange import SparseExchange
from ridgeline.runtime.sync.sparse.sparse_gradients import (
    SparseGradients,
    check_rows,
    dense_parameters,
    rows_note,
    sparse_parameters,
)
from ridgeline.runtime.sync.synchronizer import Synchronizer
from ridgeline.runtime.sync.transports.sharded import Sharded
from ridgeline.runtime.sync.transports.transport import Transport
from ridgeline.synchronisation import (
    ALGORITHMS,
    COMPRESSIONS,
    HELD,
    delay_of,
    holds,
    shards_update,
    trains_apart,
)
from ridgeline.workers.buffers import FlatBuffers
from ridgeline.workers.world import World


class StateWatch(Protocol):
    """Sees to it that what workers must hold alike they do."""

    def before_step(self) -> None:
        """A step begins.

        Raises:
            WorkloadError: the workers hold different state.
        """

    def after_step(self) -> None:
        """The step is over.

        Raises:
            WorkloadError: the workers hold different state.
        """


NO_GRADIENTS = (
    "between two steps no parameter has a gradient (parameter.grad is None), and the optimizer shows no "
    "state of it: step.optimizer_state() has that of all, and a hook on a parameter (register_hook) is given "
    "its worker's own gradient"
)


class Joined(NamedTuple):
    """What a step has of the other workers.

    Attributes:
        synchronizer: Makes what they train one.
        watch: Sees to it that they hold the same.
        outages: Of what they train through, as far as this worker has seen; None: such as end training.
    """

    synchronizer: Synchronizer
    watch: StateWatch
    outages: Callable[[], tuple[Outage, ...]] | None = None


def join_others(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer,
    world: World,
    *,
    order: Sequence[str] | None = None,
    notes: list[str] | None = None,
) -> Joined:
    """Make what exchanges gradients, or parameters, with the other workers.

    Args:
        plan: Its `sync` says how, and how often.
        model: On the worker's device, with the same parameters on all workers.
        optimizer: Of its parameters.
        world: This worker's place; size at least 2.
        order: Names in the order in which gradients are expected.
        notes: Receives what holds for a step of this rhythm.

    Raises:
        PlanError: an entry of the plan names no class, or the plan cannot exchange sparse gradients of the
            model; see `rows_refusal`.
        WorkloadError: the optimizer has parameters that are not the model's, a buffer cannot be sent, or a
            forward pass writes parameters (see `_check_no_max_norm`); or the update cannot be divided among
            the workers, or be late, as the plan says, see `check_can_shard` and `check_can_hold`; or complex
            parameters are to be compressed.
    """
    if not trains_apart(plan.sync):
        _check_no_max_norm(model)
    sparse = sparse_parameters(model)
    check_rows(plan, world.kind, tuple(sparse))
    if joining := ALGORITHMS[plan.sync.algorithm].joining:
        joined: Joined = load(joining)(plan, model, optimizer, world, order=order, notes=notes)
        return joined
    parameters, buffers = list(model.named_parameters()), FlatBuffers(model)
    # All that may refuse comes before the reducer, whose hooks would stay on the parameters.
    _check_update(plan, model, optimizer, sparse)
    transport = make_transport(plan.sync, _where_exchanged(plan.sync, world))
    if trains_apart(plan.sync):
        apart = LocalSteps(
            parameters, buffers, world=world, sync=plan.sync, transport=transport, order=order
        )
        if notes is not None:
            notes.append(_apart_note(plan.sync.every))
        return Joined(apart, CommonState(model, optimizer, apart, world))
    reducer = Reducer(
        dense_parameters(parameters, sparse, world.device) if sparse else parameters,
        buffers,
        world=world,
        engine=Engine(lanes=lanes_for(transport, world)),
        sync=plan.sync,
        transport=transport,
        order=order,
    )
    watch = OutsideWrites(model, optimizer, reducer, world)
    if shards_update(plan.sync):
        if notes is not None:
            notes.append(NO_GRADIENTS)
        return _sharded(plan.sync.algorithm, optimizer, world, reducer, transport, watch)
    if holds(plan.sync):
        held = HeldUpdate(model, optimizer, reducer)
        return Joined(held, HeldWatch(watch, held))
    if not sparse:
        return Joined(reducer, watch)
    if notes is not None and (note := rows_note(plan, tuple(sparse))):
        notes.append(note)
    exchange = SparseExchange(sparse, world, transport.mean)
    return Joined(SparseGradients(model, reducer=reducer, exchange=exchange, world=world), watch)


def _sharded(
    algorithm: str,
    optimizer: Optimizer,
    world: World,
    reducer: Reducer,
    transport: Transport,
    watch: OutsideWrites,
) -> Joined:
    """What divides the update among the workers of a reducer."""
    assert isinstance(transport, Sharded)  # no other transport leaves a worker its part alone
    update = ShardedUpdate(
        optimizer, reducer=reducer, transport=transport, world=world, algorithm=algorithm
    )
    # Behind the update all have what the owner of each part has made of it, and nothing differs any more.
    update.when_exchanged = watch.hear
    return Joined(update, watch)


def _where_exchanged(sync: Sync, world: World) -> World:
    """The workers as they exchange; where the host does so beside steps, in a group of their own."""
    encodes = COMPRESSIONS[sync.compression].encodes
    is_aside = world.kind == "cpu" and encodes and delay_of(sync) > 0
    return world.on_own_group() if is_aside else world


def _check_update(
    plan: Plan, model: nn.Module, optimizer: Optimizer, sparse: Collection[str]
) -> None:
    """See that an optimizer updates what is exchanged, and as the plan says; see `join_others`."""
    parameters = list(model.named_parameters())
    if shards_update(plan.sync):
        trained = [(name, p) for name, p in parameters if p.requires_grad]
        check_can_shard(trained, optimizer, plan.sync.algorithm)
    Coverage(parameters).check_groups(optimizer.param_groups)
    if COMPRESSIONS[plan.sync.compression].codec:
        _check_real(parameters, plan.sync.compression)
    if holds(plan.sync):
        if sparse:
            raise WorkloadError(
                f"wanted dense gradients for sync.options[{HELD.name!r}], got sparse ones of "
                f"{next(iter(sparse))}, which have no bucket; make them dense, or hold none"
            )
        check_can_hold(model, optimizer)


def _check_real(parameters: Sequence[tuple[str, nn.Parameter]], compression: str) -> None:
    """See that codecs, which work on float32, are given real numbers."""
    for name, parameter in parameters:
        if parameter.requires_grad and parameter.is_complex():
            raise WorkloadError(
                f"wanted real parameters for sync.compression={compression!r}, got {name} of "
                f"{str(parameter.dtype).removeprefix('torch.')}; use no compression, or train "
                "torch.view_as_real of it"
            )


def _check_no_max_norm(model: nn.Module) -> None:
    """See that no embedding scales, in each forward pass, the rows that this worker's batch has.

    Other workers have other rows in theirs, and would hold other parameters from then on.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise WorkloadError(
                "wanted forward passes that leave parameters as they are, got max_norm="
                f"{module.max_norm!r} in {name or type(module).__name__}, by which each worker scales the "
                "rows of its own batch alone; scale them in the loss, or after the step on all workers, or "
                "train on one worker (--workers 1)"
            )


def _apart_note(every: int) -> str:
    return (
        f"workers train alone and exchange parameters every {every} steps: between two exchanges they hold "
        "different parameters, which are not compared, and the median step has no exchange"
    )


def lanes_for(transport: Transport, world: World) -> dict[str, Callable[[Finish], LaneRunner]]:
    """Where exchanges run: on a stream; started here and awaited; or in a thread, if they block.

    Args:
        transport: That exchanges.
        world: This worker's place.
    """
    if world.device.type == "cuda":
        # Before backward's own kernels, behind which an exchange would leave late and be exposed.
        stream = torch.cuda.Stream(priority=-1)
        return {"communication": lambda finish: StreamLane(finish, stream)}
    return {} if transport.blocks else {"communication": WorkLane}
