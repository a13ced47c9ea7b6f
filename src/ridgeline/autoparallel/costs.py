"""What each operation of a program costs on its device: measured, once for equal ones."""

import functools
import time
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from ridgeline.autoparallel.graphs.aliasing import is_random, writes
from ridgeline.autoparallel.graphs.operations import Operation
from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.graphs.segments import Environment, Segment
from ridgeline.autoparallel.lanes.graph_clock import BRANCHES, GraphClock, fill_of
from ridgeline.autoparallel.scheduling.makespan import NodeCost
from ridgeline.errors import CaptureError
from ridgeline.lint.lint_judge import CalledOperator as JudgedOperation
from ridgeline.lint.lint_judge import judge
from ridgeline.tensors.nests import tensors_in
from ridgeline.workers.host_threads import set_threads

Costs = MutableMapping[str, NodeCost]
"""What was measured: operator, shapes, strides, dtypes and device to the cost."""

SERIES = 20
"""Runs of one operation in a row: one by itself is as long as the clock's own cost."""
MEASURED_S = 5e-4
"""Long operations are repeated only as often as fits into this time, but twice at least."""
ROUNDS = 5
SHARING = 0.75
"""Operations that fill less of the device leave room worth measuring."""
_measured: dict[str, NodeCost] = {}


def measure_costs(
    program: Program, args: tuple[Any, ...], *, threads: int = 1, known: Costs | None = None
) -> list[NodeCost]:
    """Seconds of every operation of a program, and the share of the device that it fills.

    The program runs once, an operation at a time, on copies of the state it writes. On a GPU an
    operation is captured 20 times in a row, whose replay gives its seconds without the host's, and
    4 and 16 such rows side by side, whose replays say how many fit on the device at once. What a
    capture cannot hold is timed between events.

    Args:
        program: What is measured.
        args: Arguments like the example's: their values choose the work where it depends on them.
        threads: Threads of an operation on the CPU: one, as on a lane, or what it has by itself.
        known: Costs to be used and added to; default: those measured earlier in this process.

    Returns:
        A cost for each operation, in their order.

    Raises:
        CaptureError: an operation failed while it was captured; names it.

    Cost: Milliseconds for each distinct operation. Waits for the device.
    """
    known = _measured if known is None else known
    environment = _private(program, program.bind(*args))
    keep = range(len(environment))
    # Values are kept for whoever reads them later, and given up after that: all at once may not fit on the
    # device.
    readers_left = {slot: len(users) for slot, users in program.users.items()}
    devices = {operation.device for operation in program.operations}
    gpus = [device.index for device in devices if device.type == "cuda"]
    clocks: dict[torch.device, GraphClock] = {}
    found: list[NodeCost] = []
    # Operations that draw random numbers run many times here, which must not move the caller's generators.
    with torch.random.fork_rng(devices=gpus), torch.no_grad():
        for index, operation in enumerate(program.operations):
            # Everything is kept, since a segment that empties what it reads could run only once.
            segment = program.segment([index], keep=keep)
            key = cost_key(operation, threads)
            if key not in known:
                trial = _on_copies(operation, environment)
                if operation.device.type == "cuda":
                    clock = clocks.setdefault(operation.device, GraphClock(operation.device))
                    known[key] = _gpu_cost(operation, segment, trial, clock)
                else:
                    known[key] = _cpu_cost(segment, trial, threads)
            # Once more where the cost was known already: the operations behind it need its values.
            segment(environment)
            found.append(known[key])
            for slot in operation.reads:
                if slot in readers_left and slot not in program.outputs:
                    readers_left[slot] -= 1
                    if not readers_left[slot]:
                        environment[slot] = None
    return found


def cost_key(operation: Operation, threads: int = 1) -> str:
    """What makes two operations cost the same: operator, plain arguments, layout of tensors, and threads."""

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            leaves = pytree.tree_leaves(value.meta.get("val"))
            return ",".join(
                f"{tuple(leaf.shape)}{leaf.stride()}{leaf.dtype}{leaf.device}"
                if isinstance(leaf, Tensor)
                else repr(leaf)
                for leaf in leaves
            )
        return repr(value)

    node = operation.node
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    where = f"{operation.device}" + (f" by {threads}" if operation.device.type == "cpu" else "")
    return f"{node.target} on {where}: " + "; ".join(map(text, leaves))


def is_capturable(operation: Operation) -> bool:
    """Whether a CUDA graph can hold an operation by itself; random ones would move the generator's state."""
    node = operation.node
    if not isinstance(node.target, OpOverload) or is_random(node):
        return False
    values = [_value(argument) for argument in (*node.all_input_nodes, node)]
    tensors = tensors_in(values)
    if any(tensor.device.type != "cuda" for tensor in tensors):
        return False
    args, kwargs = map_arg((node.args, node.kwargs), _value)
    judged = JudgedOperation(
        name=str(node.target.overloadpacket),
        tags=node.target.tags,
        args=args,
        kwargs=kwargs,
        inputs=tensors_in(args),
        outputs=tensors_in(_value(node)),
        device="cuda",
        is_constant=_never,
    )
    return judge(judged) is None


def _gpu_cost(
    operation: Operation, segment: Segment, environment: Environment, clock: GraphClock
) -> NodeCost:
    """By graphs of many runs; between events where a graph cannot hold the operation."""
    run = functools.partial(segment, environment)
    run()
    # The call before loads the kernel and has libraries choose theirs, which is no cost of the operation.
    count = _count(clock.queued_s(run, 2))
    if not is_capturable(operation):
        return NodeCost(clock.queued_s(run, count))
    # An environment for each row: in a shared one a row would free what another, on its own stream, still
    # writes.
    branches = [functools.partial(segment, list(environment)) for _ in range(max(BRANCHES))]
    fill = 1.0
    try:
        row_s = clock.row_s(run, count)
        # The least of both: a few rows can miss room that many show, and neither can show room that is not
        # there.
        for number in BRANCHES:
            rows_s = clock.side_by_side_s([*branches[:number]], count)
            fill = min(fill, fill_of(row_s, rows_s, number))
            if fill > SHARING:
                break  # more rows of what leaves no room take long and show nothing
    except RuntimeError as error:
        raise CaptureError(
            f"wanted to capture {operation.node.name} ({operation.node.target}) as a CUDA graph, got "
            f"{type(error).__name__}: {error}; the process cannot continue after a failed capture, restart "
            "it with capture=False"
        ) from error
    return NodeCost(row_s / count, fill)


def _cpu_cost(segment: Segment, environment: Environment, threads: int) -> NodeCost:
    """The least of some rounds with so many threads: whatever else runs can only add to it."""
    # On a lane an operator has fewer threads than here, and one that uses all takes a fraction of the time.
    before = torch.get_num_threads()
    set_threads(threads)
    try:
        segment(environment)
        count = _count(_seconds(segment, environment, 1))
        samples = [_seconds(segment, environment, count) for _ in range(ROUNDS)]
    finally:
        set_threads(before)
    return NodeCost(min(samples))


def _seconds(segment: Segment, environment: Environment, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        segment(environment)
    return (time.perf_counter() - begin) / count


def _count(once_s: float) -> int:
    """How often an operation is run in a row."""
    return max(2, min(SERIES, int(MEASURED_S / max(once_s, 1e-7))))


def _private(program: Program, environment: Environment) -> Environment:
    """The environment with copies of the state that the program writes."""
    written = program.written_storages()
    for slot in program.sources[: len(program.state)]:
        if environment[slot].untyped_storage().data_ptr() in written:
            environment[slot] = environment[slot].detach().clone()
    return environment


def _on_copies(operation: Operation, environment: Environment) -> Environment:
    """For an operation that writes in place an environment in which it may do so again and again."""
    trial = list(environment)
    # What it writes would grow or overflow over hundreds of runs, and all later operations would read that.
    if any(writes(member) for member in operation.members):
        for slot in operation.reads:
            if isinstance(trial[slot], Tensor):
                trial[slot] = trial[slot].clone()
    return trial


def _never(tensor: Tensor) -> bool:
    """No tensor on the host counts as a constant: there is none here."""
    return False


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, fx.Node) else node
