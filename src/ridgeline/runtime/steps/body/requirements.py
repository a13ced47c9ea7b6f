"""What a training step asks of its optimizer, its numbers and its plan, before anything is touched."""

import re
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ridgeline.errors import CaptureError, PlanError, WorkloadError
from ridgeline.execution import CALLED, MODES, check_plan
from ridgeline.optimizer_forms import (
    BY_ELEMENT,
    calls_model,
    cycled_setting,
    updates_by_element,
)
from ridgeline.optimizers.given import check_clip_norm, is_clip_norm
from ridgeline.optimizers.groups import parameters_of
from ridgeline.plan import Plan
from ridgeline.reach.reach import Reach
from ridgeline.reach.second_gradients import retained_graphs, second_gradients
from ridgeline.synchronisation import (
    HELD,
    holds,
    is_exact,
    replaces_update,
    shards_update,
    trains_apart,
    values_of,
)
from ridgeline.workers.world import JOIN, World

_EXCHANGING = ("torch.distributed._composable.", "torch.distributed.fsdp.")
"""Where the classes are that torch puts above a module's own so that it exchanges gradients itself."""
_CONTAINING = (
    "use execution='eager', or 'step-graph' (on a GPU 'graph', too) where it can be one program"
)
_COMPILED_TOO = re.compile(r"'compiled'(, which leaves that to Python,)? or 'eager'")
_PARTED = "torch.distributed.tensor"
"""Where the class of tensors is of which each worker holds a part."""


def check_training(optimizer: Optimizer, plan: Plan, clip_norm: float | None) -> None:
    """What a step asks of its optimizer and of clipping.

    Raises:
        PlanError: one of them is not for a step, or not for this plan.
    """
    check_calls(optimizer, plan)
    check_steady(optimizer, plan)
    check_clip_norm(clip_norm)
    check_momentum(optimizer, plan)
    check_sharded(optimizer, plan)
    check_replaced(optimizer, plan, clip_norm)
    check_held(optimizer, plan, clip_norm)
    check_apart(optimizer, plan)


def check_differentiable(model: nn.Module, loss_fn: Any, plan: Plan) -> None:
    """Refuse a form whose backward pass cannot be differentiated, before any step has begun.

    A step may ask for it now and then only: its failure would leave one half done. Graphs of eager operators
    and whole steps as one program contain the second pass.

    A second backward pass through the same call finds what the first one has used up, likewise: what was
    compiled gives its memory away ("donated buffers"), and a graph is replayed once.

    Source: torch 2.11 and 2.13 (`_functorch/_aot_autograd/runtime_wrappers.py`) raise in each backward pass
    through a compiled function that is to be differentiated, with donated buffers or without.

    Raises:
        CaptureError: names the place in the code, and the forms to use.

    Cost: See `second_gradients`; nothing for other forms.
    """
    mode = MODES[plan.execution]
    if not (mode.form in ("compiled", "regional") or mode.replays_model):
        return
    if place := second_gradients(model, loss_fn):
        raise CaptureError(
            f"wanted a step without gradients of gradients for execution={plan.execution!r}, got "
            f"create_graph=True or torch.autograd.functional in {place}; {_CONTAINING}"
        )
    if place := retained_graphs(model, loss_fn):
        raise CaptureError(
            f"wanted a step with one backward pass through each call for execution={plan.execution!r}, got "
            f"retain_graph=True in {place}; {_CONTAINING}"
        )


def advised_otherwise(error: CaptureError, model: nn.Module, loss_fn: Any) -> CaptureError | None:
    """The refusal of a step as one program, without advice to compile what `check_differentiable` refuses.

    None where all that the refusal advises takes this step.
    """
    text = _COMPILED_TOO.sub("'eager'", str(error))
    if text == str(error) or not (
        second_gradients(model, loss_fn) or retained_graphs(model, loss_fn)
    ):
        return None
    return type(error)(text)


def check_second_order(optimizer: Optimizer, plan: Plan, *, num_workers: int) -> None:
    """Refuse what hands an optimizer gradients without a graph, for one that differentiates them again.

    Raises:
        CaptureError: the plan's form captures or compiles.
        PlanError: several workers, whose averaged gradients are numbers.
    """
    name = type(optimizer).__name__
    if plan.execution != "eager":
        raise CaptureError(
            f"wanted an optimizer that takes gradients as they are for execution={plan.execution!r}, got "
            f"{name}, which differentiates them again; use execution='eager'"
        )
    if num_workers > 1:
        raise PlanError(
            f"wanted a single worker for {name}, which differentiates gradients again, got "
            f"workers={num_workers}; averaged gradients have no graph: use another optimizer, or one worker"
        )


def check_undistributed(
    model: nn.Module, loss_fn: object, optimizer: Optimizer, world: World
) -> None:
    """The step averages gradients; a wrapper that does so too would write over them, and divide them again.

    Nothing is asked where there are no other workers, nor of networks that this optimizer does not train.

    Raises:
        PlanError: what the optimizer trains is, or is inside of, a `DistributedDataParallel` or a fully
            sharded module, in the model or among what the loss function names, or is split among workers.

    Cost: Follows all references of model and loss function: 35 to 120 ms for 150 modules on a busy CPU.
    """
    if not world.is_among_others:
        return
    trained = {id(p): p for p in parameters_of(optimizer)}
    for module in Reach(model, loss_fn).modules:
        name = _exchanging(module)
        if name and any(id(p) in trained for p in module.parameters()):
            raise PlanError(
                f"wanted a network whose gradients the step averages over {world.size} workers, got one in "
                f"{name}, which averages them itself; leave that out, and give the step the network as it "
                "was before (the .module of a wrapper), which the loss function calls"
            )
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    for tensor in (*trained.values(), *model.buffers()):
        if type(tensor).__module__.startswith(_PARTED):
            raise PlanError(
                f"wanted parameters and buffers that each of {world.size} workers holds whole, got "
                f"{names.get(id(tensor), 'one')!r} as a {type(tensor).__name__}, of which each holds a part; "
                "give the network before it is split (sync.algorithm='sharded' splits the optimizer's state)"
            )


def _exchanging(module: nn.Module) -> str:
    """The class that makes a module exchange gradients itself; nothing where none does."""
    if isinstance(module, DistributedDataParallel):
        return DistributedDataParallel.__name__
    bases = type(module).__mro__
    return next((b.__name__ for b in bases if f"{b.__module__}.".startswith(_EXCHANGING)), "")


def check_calls(optimizer: Optimizer, plan: Plan) -> None:
    """An optimizer that calls the loss itself (LBFGS) needs a step whose update stands apart, on one worker.

    Raises:
        PlanError: the plan replays the step, makes one program of it, or shares it between workers.
    """
    if not calls_model(optimizer):
        return
    name = type(optimizer).__name__
    if plan.execution not in CALLED:
        words = ", ".join(repr(word) for word in CALLED)
        raise PlanError(
            f"wanted execution as one of {words} for {name}, which calls the loss any number of times, got "
            f"{plan.execution!r} in the plan; choose one of those"
        )
    if plan.workers > 1:
        raise PlanError(
            f"wanted workers=1 for {name}, which decides by its own worker's loss how often it calls it, got "
            f"{plan.workers} in the plan; train on one worker (--workers 1)"
        )


def check_steady(optimizer: Optimizer, plan: Plan) -> None:
    """One program has all settings but the learning rate in it as constants, and is compiled for them.

    Raises:
        PlanError: the plan makes one program of the step, and a scheduler changes another one in each step.
    """
    if not MODES[plan.execution].is_one_program:
        return
    for number, group in enumerate(optimizer.param_groups):
        if setting := cycled_setting(group):
            raise PlanError(
                f"wanted settings that stay for execution={plan.execution!r}, whose one program has them as "
                f"constants, got {type(optimizer).__name__} whose {setting} a scheduler changes between "
                f"{group['base_momentum']!r} and {group['max_momentum']!r} in group {number}; give the "
                "scheduler cycle_momentum=False, or use execution='compiled'"
            )


def check_momentum(optimizer: Optimizer, plan: Plan) -> None:
    """A compression that accumulates momentum before it sends wants an optimizer that adds none after.

    Raises:
        PlanError: the plan's compression has the option `momentum` above 0, and a group of the optimizer a
            momentum, or betas, of its own.
    """
    # One worker sends nothing, so its plan's compression never adds a momentum.
    if plan.workers == 1 or not values_of(plan.sync).get("momentum"):
        return
    name = type(optimizer).__name__
    for number, group in enumerate(optimizer.param_groups):
        # `get`, not `in`: SGD has the setting in every group, mostly as 0.
        own = {key: group[key] for key in ("momentum", "betas") if group.get(key)}
        for key, value in own.items():
            raise PlanError(
                f"wanted an optimizer without momentum for compression={plan.sync.compression!r} with "
                f"momentum={plan.sync.options['momentum']!r}, got {name} with {key}={value!r} in group "
                f"{number}: it would be added twice; use SGD with momentum=0, or leave the option out"
            )


def check_sharded(optimizer: Optimizer, plan: Plan) -> None:
    """An update in parts, cut through the middle of parameters, wants an optimizer that looks at no whole.

    Raises:
        PlanError: the plan divides the update among workers, and the optimizer is not known to update each
            element by itself.
    """
    if plan.workers == 1 or not shards_update(plan.sync) or updates_by_element(optimizer):
        return
    raise PlanError(
        f"wanted an optimizer that updates each element by itself for sync.algorithm={plan.sync.algorithm!r} "
        f"(torch's {', '.join(BY_ELEMENT)}), got {type(optimizer).__name__}, which may look at whole "
        "parameters; use one of those, or another algorithm"
    )


def check_replaced(optimizer: Optimizer, plan: Plan, clip_norm: float | None) -> None:
    """A store that updates parameters makes the optimizer again by its name, and updates as gradients come.

    Raises:
        PlanError: the plan has such a store, and the optimizer is no class of torch's; or gradients are to be
            clipped by a norm that is known when all of them have come.
    """
    if plan.workers == 1 or not replaces_update(plan.sync):
        return
    algorithm, name = plan.sync.algorithm, type(optimizer).__name__
    # By identity: a subclass of the same name would be made again as torch's own.
    if getattr(torch.optim, name, None) is not type(optimizer):
        raise PlanError(
            f"wanted an optimizer of torch.optim for sync.algorithm={algorithm!r}, which makes it again by "
            f"its name, got {type(optimizer).__module__}.{name}; use one of those, or another algorithm"
        )
    if clip_norm is not None:
        raise PlanError(
            f"wanted clip_norm=None for sync.algorithm={algorithm!r}, got {clip_norm!r}: parameters are "
            "updated while gradients still come, whose total norm is not known yet; leave it out, or use "
            "another algorithm"
        )


def check_held(optimizer: Optimizer, plan: Plan, clip_norm: float | None) -> None:
    """Parameters that are updated some at a time want an optimizer, and gradients, that need no others.

    Raises:
        PlanError: the plan holds buckets, and the optimizer is not known to update each element by itself,
            has fused groups, whose kernels look at all of a group, or its gradients are to be clipped.
    """
    if plan.workers == 1 or not holds(plan.sync):
        return
    name, field = type(optimizer).__name__, f"sync.options[{HELD.name!r}]"
    if not updates_by_element(optimizer):
        raise PlanError(
            f"wanted an optimizer that updates each element by itself for {field} (torch's "
            f"{', '.join(BY_ELEMENT)}), got {name}, which may look at all parameters; use one of those, or "
            "hold none"
        )
    # The plan's own switch, too: groups are made fused after this check only.
    is_fused = any(group.get("fused") for group in optimizer.param_groups)
    if is_fused or plan.optimizer == "fused":
        raise PlanError(
            f"wanted an optimizer that is not fused for {field}, got fused {name}: its kernels are chosen "
            "for whole groups; leave one of them out"
        )
    if clip_norm is not None:
        raise PlanError(
            f"wanted clip_norm=None for {field}, got {clip_norm!r}: the next step begins before all "
            "gradients have come, whose total norm is not known yet; leave one of them out"
        )


def check_apart(optimizer: Optimizer, plan: Plan) -> None:
    """Workers that train alone want optimizers that leave the others' parameters alone.

    Raises:
        PlanError: the plan exchanges parameters every few steps, and the optimizer does so by itself in each.
    """
    if plan.workers == 1 or not trains_apart(plan.sync):
        return
    if any(base.__module__.startswith("torch.distributed.") for base in type(optimizer).__mro__):
        raise PlanError(
            f"wanted an optimizer of each worker's own for sync.every={plan.sync.every}, got "
            f"{type(optimizer).__name__}, which exchanges parameters among workers itself; use an optimizer "
            "of torch.optim, or sync.every=1"
        )


def check_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that a backward pass left without any gradient, since it is another model's.

    One that holds some of the model's parameters may still train them in another step.

    Raises:
        WorkloadError: no parameter of it is the model's or got a gradient.
    """
    # Gradients may come from parameters that the model does not register, so either is enough.
    known = set(model.parameters())
    held = parameters_of(optimizer)
    if not any(p.grad is not None or p in known for p in held):
        raise WorkloadError(
            f"wanted an optimizer of parameters that the loss has, got {type(optimizer).__name__} of "
            f"{len(held)} that are not in {type(model).__name__} and got no gradient; make it from "
            "model.parameters()"
        )


def check_seconds(seconds: object) -> None:
    """Refuse a time for the choice that is no finite number above 0, or None.

    Raises:
        PlanError: names the value and what to give.
    """
    if not is_clip_norm(seconds):  # numbers of the same kind
        raise PlanError(
            f"wanted seconds as a finite number above 0, or None, got {seconds!r}; give how long the choice "
            "of a plan may take"
        )


def check_joins(plan: object, world: World) -> None:
    """A worker that takes part in a training that runs is alone, and has the plan of that training.

    Raises:
        PlanError: it is one of several, or the plan is of another kind; nothing where it joins none.
    """
    if not world.joins:
        return
    if world.size > 1:
        raise PlanError(
            f"wanted a single process for {JOIN}={world.joins!r}, got one of {world.size} workers; start "
            "each of them with a torchrun of its own, or without"
        )
    is_plan = isinstance(plan, Plan) and plan.workers > 1
    if not is_plan or not replaces_update(plan.sync) or is_exact(plan.sync):
        got = f"workers={plan.workers}, sync={plan.sync!r}" if isinstance(plan, Plan) else plan
        raise PlanError(
            f"wanted the plan of the training at {JOIN}={world.joins!r}, whose workers do not wait for each "
            f"other (sync.algorithm='kvstore' of kind 'dist_async', workers above 1), got {got}; give that "
            "plan, or unset the variable"
        )


def check_supported(plan: Plan, world: World) -> None:
    """Refuse what cannot be honoured, before anything is touched.

    Raises:
        PlanError: names the field, what it may be, and what to do.
    """
    check_plan(plan, world.kind)
    # Who joins is one process, however many workers the training has that it takes part in.
    if world.joins:
        check_joins(plan, world)
    elif plan.workers != world.size:
        raise PlanError(
            f"wanted a world of workers={plan.workers} as in the plan, got {world.size} processes; start "
            f"them with `torchrun --nproc-per-node {plan.workers}` or make a plan for {world.size}"
        )
