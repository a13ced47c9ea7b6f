"""The knobs that the planner turns: their names, what users may fix, and which values are tried."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from ridgeline.errors import PlanError
from ridgeline.execution import MODES, PRECISIONS, check_alone, check_offered, runs_uncaptured
from ridgeline.machine import Machine
from ridgeline.plan import (
    Execution,
    Feed,
    Kernels,
    MemoryFormat,
    OptimizerForm,
    Plan,
    Precision,
    RandomNumbers,
    is_whole,
)
from ridgeline.planner.exchanges.exchanges import (
    APART_PERMISSION,
    GIVEN,
    PERMISSION,
    SEARCHED,
    check_exchanges,
    exchange_changes,
    exchanges_in,
)
from ridgeline.planner.exchanges.held import held_plans
from ridgeline.planner.exchanges.pruning import Pruned, fitting
from ridgeline.planner.exchanges.ways import exchanging_plans, with_first_way
from ridgeline.planner.request import PlanRequest
from ridgeline.simulator.compiler.fusion import blocks_of
from ridgeline.simulator.compiler.untranslated import has_sizes_by_values
from ridgeline.simulator.model import setting_of, workers_in_host
from ridgeline.synchronisation import DEFAULT_BUCKET_BYTES
from ridgeline.workload import Workload

KNOBS = (
    "workers",
    "threads",
    "execution",
    "precision",
    "memory_format",
    "optimizer",
    "kernels",
    "random",
    "accumulate",
    *SEARCHED,
    "bucket_bytes",
    "depth",
)
"""Every knob of a plan that this release turns, in the order in which they are explained."""

EXECUTIONS: dict[str, tuple[Execution, ...]] = {
    "cpu": ("eager", "compiled", "step-graph", "packaged"),
    "cuda": ("eager", "graph", "compiled", "regional+graph", "compiled+graph", "step-graph"),
}
"""Modes that are searched: what users have without Ridgeline (eager, compiled), and its own. Others can be
fixed; regions pay on a CPU no less host time than they save."""
MODEL_GRAPHS: tuple[Execution, ...] = ("model-graph", "compiled+model-graph")
"""Modes that are searched where a GPU cannot replay the whole step."""
NO_PRECISION = ("random", PERMISSION, APART_PERMISSION)
"""Changes of the maths that are no precisions: random numbers that compiled programs draw, gradients that are
sent with losses, and workers that train alone between exchanges."""
INEXACT = ("tf32", "bf16", *NO_PRECISION)
"""Changes of the maths that may be allowed."""
WORDS: dict[str, tuple[str, ...]] = {
    "memory_format": get_args(MemoryFormat),
    "optimizer": get_args(OptimizerForm),
    "kernels": get_args(Kernels),
    "random": get_args(RandomNumbers),
}
"""Values of the knobs that are words."""


def make_request(
    machine: Machine,
    workload: Workload | Mapping[int, Workload],
    world_size: int | None,
    fixed: Mapping[str, object],
    allow: Collection[str],
    steps: int | None = None,
) -> PlanRequest:
    """The request, when it can be met at all.

    Raises:
        PlanError: an unknown knob or permission, a value that is impossible, or no workload for it.
    """
    for name, count in (("world_size", world_size), ("steps", steps)):
        if count is not None:
            _check_count(name, count, 1)
    checked = {name: _checked(name, value) for name, value in fixed.items()}
    check_allowed(allow)
    workers = checked.get("workers")
    if isinstance(workload, Workload):
        if workers is not None and world_size is not None and workers != world_size:
            raise PlanError(
                f"wanted one number of workers, got fixed workers={workers} and world_size={world_size}; "
                "give one of them"
            )
        workloads = {workers or world_size or 1: workload}
    elif not _are_workloads(workload):
        raise PlanError(
            f"wanted a Workload, or one by number of workers, got workload={workload!r}; make one by "
            "rl.trace(), or read it by rl.Workload.load(path)"
        )
    else:
        for count in workload:
            _check_count("the number of workers of a workload", count, 1)
        workloads = {
            count: load
            for count, load in workload.items()
            if (world_size is None or count <= world_size) and workers in (None, count)
        }
        if not workloads:
            limit = f"workers={workers}" if workers is not None else f"world_size={world_size}"
            raise PlanError(
                f"wanted a workload for {limit}, got workloads for {sorted(workload)} workers; trace the "
                "step with the batch of a worker at that number"
            )
    device = next(iter(workloads.values())).device
    _check_device(device, checked, allow)
    # For the largest number: an exchange may need more workers than the smaller ones have.
    check_exchanges(checked, allow, device, max(workloads))
    execution = checked.get("execution")
    if execution is not None and MODES[execution].is_one_program:
        check_alone(execution, min(workloads))
        # One program exchanges nothing, so plans for more workers would all be refused one by one.
        workloads = {1: workloads[1]}
    return PlanRequest(machine, workloads, device, checked, tuple(allow), steps)


def enumerate_plans(request: PlanRequest) -> tuple[list[Plan], list[Pruned]]:
    """Every plan worth simulating, and those ruled out.

    By memory, by gradients that workers cannot exchange, or for lack of blocks to compile.

    Raises:
        MachineError: the profile lacks what the bucket search needs.
    """
    plans: list[Plan] = []
    pruned: list[Pruned] = []
    for plan in _frames(request):
        workload = request.workloads[plan.workers]
        is_regional = MODES[plan.execution].form == "regional"
        if is_regional and "execution" not in request.fixed and not blocks_of(workload):
            reason = "no module path names numbered blocks to compile one by one"
            pruned.append(Pruned(plan, reason, "fix another execution"))
            continue
        may_split = "accumulate" not in request.fixed
        first = with_first_way(request, plan)
        found = fitting(request.machine, workload, first, may_split=may_split)
        if isinstance(found, Pruned):
            pruned.append(found)
            continue
        ways, without = exchanging_plans(request, found)
        plans += ways
        for one in without:
            # The same way is ruled out in every frame of threads, execution and precision.
            if not any(_is_told(one, known) for known in pruned):
                pruned.append(one)
    held = held_plans(request.machine, request.workloads, request.fixed, plans)
    return [*plans, *held], pruned


def _is_told(one: Pruned, known: Pruned) -> bool:
    """Whether a plan that was ruled out says nothing that one which is known does not."""
    is_alike = (one.reason, one.plan.workers) == (known.reason, known.plan.workers)
    return one == known or (is_alike and (one.is_of_workload or one.plan.sync == known.plan.sync))


def enumerate_model_graphs(request: PlanRequest) -> list[Plan]:
    """Plans that replay the model alone; none where the user fixed another mode, or several workers train.

    Nor where sizes within the model depend on values: a trial of seconds would find that obstacle again.
    """
    if request.device != "cuda" or "execution" in request.fixed or 1 not in request.workloads:
        return []
    if has_sizes_by_values(request.workloads[1]):
        return []
    alone = request._replace(workloads={1: request.workloads[1]})
    found: list[Plan] = []
    for execution in MODEL_GRAPHS:
        plans, _ = enumerate_plans(alone._replace(fixed={**request.fixed, "execution": execution}))
        # Its gradients are overwritten by the next backward pass, so a replayed model cannot accumulate.
        found += [plan for plan in plans if plan.accumulate == 1]
    return found


def num_changes(plan: Plan) -> int:
    """What differs from the plainest plan: one worker, eager, as-is, default exchange, buckets and feed.

    Compiling, capturing and packaging count apart.
    """
    mode = MODES[plan.execution]
    return sum(
        (
            plan.workers > 1,
            mode.is_compiled,
            mode.is_captured or mode.is_one_program,
            mode.form == "packaged",
            plan.precision != "as-is",
            plan.memory_format != "as-is",
            plan.optimizer != "as-is",
            plan.kernels != "default",
            plan.random != "as-is",
            plan.accumulate > 1,
            exchange_changes(plan),
            plan.workers > 1 and plan.sync.bucket_bytes != DEFAULT_BUCKET_BYTES,
            plan.feed != Feed(),
        )
    )


def value_of(plan: Plan, knob: str) -> str:
    """The value of a knob of a plan, as text."""
    if knob == "bucket_bytes":
        return ", ".join(str(limit) for limit in plan.sync.bucket_bytes)
    if knob == "options":
        return ", ".join(f"{name}={value}" for name, value in plan.sync.options.items()) or "none"
    if knob in (*SEARCHED, *GIVEN):
        return str(getattr(plan.sync, knob))
    if knob == "depth":
        return str(plan.feed.depth)
    return str(getattr(plan, knob))


def _frames(request: PlanRequest) -> Iterator[Plan]:
    """Plans by workers, threads, execution and precision; default buckets."""
    fixed = request.fixed
    executions: tuple[Execution, ...] = EXECUTIONS[request.device]
    if "execution" in fixed:
        executions = (fixed["execution"],)
    elif fixed.get("every", 1) > 1:
        executions = tuple(e for e in executions if runs_uncaptured(e, request.device))
    precisions: tuple[Precision, ...] = (
        "as-is",
        *(p for p in PRECISIONS[request.device] if p in request.allow),
    )
    if "precision" in fixed:
        precisions = (fixed["precision"],)
    feed = Feed(depth=fixed.get("depth", Feed().depth))
    for workers in sorted(request.workloads):
        # Workers that share cores in turns would each be as slow as the turns.
        if not _has_room(request, workers):
            continue
        alone = [e for e in executions if workers == 1 or exchanges_in(e, fixed, request.device)]
        for threads in _threads(request, workers):
            for execution in alone:
                for precision in precisions:
                    plan = Plan(
                        workers=workers,
                        threads=threads,
                        execution=execution,
                        precision=precision,
                        accumulate=fixed.get("accumulate", 1),
                        feed=feed,
                    )
                    yield from _forms(request, plan)


def _forms(request: PlanRequest, plan: Plan) -> Iterator[Plan]:
    """The plan with every memory format, optimizer, kernels and random numbers worth comparing in it."""
    mode = MODES[plan.execution]
    workload = request.workloads[plan.workers]
    on_gpu = request.device == "cuda"
    # A captured step takes the fused form anyway, so it would be the same plan twice.
    is_fusable = on_gpu and not mode.is_replayed_on("cuda") and workload.fused_optimizer_bytes
    may_draw = "random" in request.allow and workload.draws_random
    moves_draws = not _draws_alike(workload, plan)
    searched: dict[str, tuple[str, ...]] = {
        "memory_format": _memory_formats(workload, plan),
        "optimizer": ("fused",) if is_fusable else ("as-is",),
        "kernels": ("default",),
        "random": ("as-is", "compiled")
        if may_draw and (mode.is_compiled or moves_draws)
        else ("as-is",),
    }
    if on_gpu and mode.form == "compiled" and mode.is_replayed:
        searched["kernels"] = ("default", "combined")
    values = [
        (request.fixed[name],) if name in request.fixed else options
        for name, options in searched.items()
    ]
    for words in itertools.product(*values):
        if "combined" in words and "compiled" in words:
            continue  # two variants at once say nothing that each alone does not
        found = msgspec.structs.replace(plan, **dict(zip(searched, words, strict=True)))
        if _draws_as_said(found, moves_draws=moves_draws, fixed=request.fixed):
            yield found


def _draws_alike(workload: Workload, plan: Plan) -> bool:
    """Whether the step draws the same random numbers with its channels innermost."""
    if not workload.draws_random:
        return True
    plain, moved = (workload.at(plan.precision, name) for name in ("as-is", "channels_last"))
    is_traced = moved.memory_format == "channels_last" and moved.precision == plain.precision
    return is_traced and moved.draws_like(plain)


def _draws_as_said(plan: Plan, *, moves_draws: bool, fixed: Mapping[str, Any]) -> bool:
    """Whether the plan's word for its random numbers is true; a memory format that is fixed is left alone."""
    if "memory_format" in fixed:
        return True
    if plan.memory_format == "channels_last" and moves_draws:
        return plan.random == "compiled"
    return plan.random == "as-is" or "random" in fixed or MODES[plan.execution].is_compiled


def _memory_formats(workload: Workload, plan: Plan) -> tuple[str, ...]:
    """The formats worth comparing in the plan's precision: where some were traced, those that were."""
    if not workload.has_images:
        return ("as-is",)
    traced = [load for load in workload.variants if load.memory_format == "channels_last"]
    is_known = not traced or any(load.precision == plan.precision for load in traced)
    return ("as-is", "channels_last") if is_known else ("as-is",)


def _has_room(request: PlanRequest, workers: int) -> bool:
    """Whether a number of workers that is not fixed fits the cores."""
    if request.device == "cuda" or len(request.workloads) == 1 or "workers" in request.fixed:
        return True
    # At least one thread each, also where the number is left open.
    in_host = workers_in_host(request.machine, workers)
    return in_host * max(1, request.fixed.get("threads", 1)) <= request.machine.host.cores


def _threads(request: PlanRequest, workers: int) -> tuple[int, ...]:
    if "threads" in request.fixed:
        return (request.fixed["threads"],)
    # As a plan that leaves them open is predicted: an equal share of the cores of a host.
    alike = Plan(workers=workers)
    return (setting_of(request.machine, request.workloads[workers], alike).threads,)


def _are_workloads(given: object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(load, Workload) for load in given.values())


def check_allowed(allow: Collection[str]) -> None:
    """Raise a PlanError for what is not a collection of known changes of the maths."""
    if isinstance(allow, str) or not isinstance(allow, Collection):
        example = allow if isinstance(allow, str) else "bf16"
        raise PlanError(
            f"wanted allow to be a collection of names, got {allow!r}; give allow=({example!r},)"
        )
    for name in allow:
        if name not in INEXACT:
            raise PlanError(
                f"wanted allow to name changes of the maths out of {', '.join(INEXACT)}, got {name!r}; "
                "leave it out"
            )


def _check_device(device: str, fixed: Mapping[str, Any], allow: Collection[str]) -> None:
    if "execution" in fixed:
        check_offered(fixed["execution"], "step", device)
    allowed = [("allow", name) for name in allow if name not in NO_PRECISION]
    for name, value in (("precision", fixed.get("precision")), *allowed):
        if value is not None and value not in PRECISIONS[device]:
            words = ", ".join(repr(word) for word in PRECISIONS[device])
            raise PlanError(
                f"wanted {name} to be one of {words} on {device}, got {value!r}; this release runs no "
                "other there"
            )


def _checked(name: str, value: object) -> Any:
    """A fixed knob's value in the form in which plans hold it."""
    known = (*KNOBS, *GIVEN)
    if name not in known:
        raise PlanError(
            f"wanted fixed knobs out of {', '.join(known)}, got {name!r}; correct its name"
        )
    if name in ("execution", "precision", "options", "algorithm", "compression"):
        return value
    if name in WORDS:
        if value in WORDS[name]:
            return value
        words = " or ".join(repr(word) for word in WORDS[name])
        raise PlanError(f"wanted {name} as {words}, got {value!r}; correct it")
    if name == "bucket_bytes":
        limits = tuple(value) if isinstance(value, Sequence) else (value,)
        if limits and all(is_whole(v) and v >= 1 for v in limits):
            return limits
        raise PlanError(
            f"wanted bucket_bytes as bytes >= 1 or a tuple of them, got {value!r}; for example 4194304"
        )
    _check_count(name, value, 0 if name in ("threads", "depth") else 1)
    return value


def _check_count(name: str, value: object, least: int) -> None:
    if not (is_whole(value) and value >= least):
        raise PlanError(f"wanted {name} as a whole number >= {least}, got {value!r}; correct it")
