"""What torch's compiler makes one kernel of: runs of operators that need no contraction in between.

Elementwise operators, normalisations, reductions and copies that feed each other become one kernel, which
reads what comes from outside and writes what is used outside or stays; on a GPU also what takes elements by
index for it, and what adds its results by index. Contractions (matrix products, convolutions, attention)
stay what they are.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import NamedTuple

from ridgeline.execution import Form
from ridgeline.simulator.compiler.recompute import Saved, recomputed
from ridgeline.simulator.compiler.rewriting import (
    adds_by_index,
    indexed_input,
    takes_by_index,
    writes_loop,
)
from ridgeline.simulator.compiler.untranslated import untranslated
from ridgeline.simulator.pricing.dataflow import (
    DataFlow,
    data_flow,
    operator_name,
    spec_bytes,
    spec_elements,
)
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.workload import Op, TensorSpec, Workload

FUSABLE = ("elementwise", "normalization", "reduction", "copy")
"""Families that Inductor translates to loops of its own and joins.

Source: torch/_inductor/lowering.py; contractions become calls of libraries or templates instead.
"""

LEFT_TO_LIBRARIES = (
    "topk",
    "sort",
    "kthvalue",
    "median",
    "nanmedian",
    "mode",
    "histc",
    "bincount",
    "_cdist_forward",
)
"""Operators of these families that Inductor does not translate; it sorts rows of a few hundred by itself.

Source: fallbacks in torch/_inductor/lowering.py, releases 2.11 to 2.13.
"""

READ_TWICE: dict[str, int] = {
    "native_group_norm": 1,
    "native_batch_norm_backward": 2,
    "cudnn_batch_norm_backward": 2,
    "native_group_norm_backward": 2,
    "native_layer_norm_backward": 2,
}
"""Normalisations whose statistics run across what their loop is over, and how many of their first inputs are
read once more than eager torch reads them. A layer's forward pass has its rows on the chip.

Source: kernels that torch 2.11 writes for ResNet-50, MobileNet-V2, DenseNet-121, BERT-base and ViT-B/16.
"""
LEAST_REDUCED = 64
"""Elements that become one from which on a reduction is a pass of its own over what another kernel writes."""


class Run(NamedTuple):
    """Operators that become one kernel or a few: their indices in order, and the bytes that move."""

    ops: tuple[int, ...]
    bytes_read: int
    bytes_written: int

    @property
    def num_bytes(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written


@kept_by_identity(32)
def fused_runs(workload: Workload, form: Form, *, owns_random: bool = False) -> tuple[Run, ...]:
    """The runs of at least two operators that a form of the step makes one kernel of, by first operator.

    Two operators are joined when one takes the other's result, both lie in the same compiled part of the
    step, and no other way between them leads out of the run: then the kernels still have an order. What
    a reduction gives is read back by a later kernel where it is spread over more elements.

    Args:
        workload: Its edges, shapes and module paths are used.
        form: `eager` fuses nothing; see `part_of`.
        owns_random: Whether kernels draw random numbers of their own; else the library draws eager's.

    Source: assumed; Inductor fuses nodes that share memory unless that makes a cycle
        (torch/_inductor/scheduler.py).
    """
    ops, flow = workload.ops, data_flow(workload)
    part = parts_of(workload, form)
    on_gpu = workload.device == "cuda"

    def part_of_loop(op: Op) -> Hashable:
        return part(op) if is_loop(op, on_gpu=on_gpu, owns_random=owns_random) else None

    groups = _joined(ops, flow, part_of_loop)
    saved = recomputed(workload, groups, lambda op: part_of_loop(op) is not None)
    # Single operators are priced by `run_alone`: only as loops, or else as libraries have them.
    runs = [_run(ops, flow, members) for members in groups if len(members) > 1]
    return tuple(sorted(_less(run, saved) for run in runs))


def _less(run: Run, saved: Saved) -> Run:
    """The run without what its step does not store for the backward pass."""
    read = run.bytes_read - sum(saved.read.get(index, 0) for index in run.ops)
    written = run.bytes_written - sum(saved.written.get(index, 0) for index in run.ops)
    return Run(run.ops, max(0, read), max(0, written))


def is_loop(op: Op, *, on_gpu: bool, owns_random: bool) -> bool:
    """Whether the compiler writes an operator as a loop of its own; all others stay calls of libraries."""
    if op.draws_random and not owns_random:
        return False
    if op.family in FUSABLE:
        return operator_name(op) not in LEFT_TO_LIBRARIES
    return on_gpu and writes_loop(op)


def run_alone(workload: Workload, index: int) -> Run:
    """The kernel of one operator that is joined to no other."""
    return _run(workload.ops, data_flow(workload), (index,))


def parts_of(workload: Workload, form: Form) -> Callable[[Op], Hashable]:
    """Tells which compiled part of the step an operator lies in; None: it runs as it is.

    `compiled`: forward and backward, less what the compiler leaves alone. `regional`: each block of each of
    them. `step-graph`, `packaged`: forward, backward and optimizer; gradients stay, so kernels end where the
    optimizer begins.
    """
    if form == "regional":
        block_of = _block_finder(workload)
        return lambda op: (op.phase, block_of(op)) if block_of(op) else None
    if form == "compiled":
        is_left = untranslated(workload)
        return lambda op: None if op.phase == "optimizer" or is_left(op) else op.phase
    if form in ("step-graph", "packaged"):
        return lambda op: op.phase
    return lambda op: None


def blocks_of(workload: Workload) -> dict[str, tuple[int, ...]]:
    """Repeated blocks by module path: the operators of each, in order.

    A block is the innermost numbered module (`layers.3`) that has modules beneath it.
    """
    block_of = _block_finder(workload)
    found: dict[str, list[int]] = {}
    for index, op in enumerate(workload.ops):
        if block_of(op):
            found.setdefault(block_of(op), []).append(index)
    return {path: tuple(members) for path, members in found.items()}


def _block_finder(workload: Workload) -> Callable[[Op], str]:
    paths = {op.module for op in workload.ops}
    parents = {
        path[:end] for path in paths for end in range(len(path)) if path[end] == "."
    }  # every proper prefix, so what has something beneath it
    blocks: dict[str, str] = {}
    for path in paths:
        words = path.split(".")
        prefixes = [".".join(words[:n]) for n in range(len(words), 0, -1)]
        blocks[path] = next(
            (p for p in prefixes if p.rpartition(".")[2].isdigit() and p in parents), ""
        )
    return lambda op: blocks[op.module] if op.phase != "optimizer" else ""


def _joined(
    ops: Sequence[Op], flow: DataFlow, part: Callable[[Op], Hashable]
) -> list[tuple[int, ...]]:
    """Groups of operators that are joined, each in order and of one depth, so that none waits for itself."""
    joins = [
        {
            other: _is_joinable(ops[other], op, part)
            and not _is_whole_first(flow, index, op, other)
            for other in flow.waits[index]
        }
        for index, op in enumerate(ops)
    ]
    depth = _depths(ops, joins)
    leader = list(range(len(ops)))

    def find(index: int) -> int:
        while leader[index] != index:
            # Halving paths keeps this near to linear: steps have tens of thousands of operators.
            leader[index] = leader[leader[index]]
            index = leader[index]
        return index

    for index, before in enumerate(joins):
        for other, is_joinable in before.items():
            if is_joinable and depth[other] == depth[index]:
                leader[find(index)] = find(other)
    groups: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        if part(op) is not None:
            groups.setdefault(find(index), []).append(index)
    return [tuple(members) for members in groups.values()]


def _depths(ops: Sequence[Op], joins: Sequence[dict[int, bool]]) -> list[int]:
    """The most kernel boundaries on a way to each operator.

    What could be joined to its user only (momentum that decays before the gradient is there) waits for it.
    """
    depth: list[int] = []
    latest: dict[int, int] = {}
    for before in joins:
        # Equal depth means that no kernel boundary lies on any way between two operators.
        depth.append(max((depth[o] + (not joinable) for o, joinable in before.items()), default=0))
    for index in range(len(ops) - 1, -1, -1):
        # One that is joined to an earlier operator stays in that kernel; moving it would break the join.
        is_follower = any(j and depth[o] == depth[index] for o, j in joins[index].items())
        if not is_follower:
            depth[index] = max(depth[index], latest.get(index, 0))
        for other, is_joinable in joins[index].items():
            limit = depth[index] - (not is_joinable)
            latest[other] = min(latest.get(other, limit), limit)
    return depth


def _is_joinable(first: Op, second: Op, part: Callable[[Op], Hashable]) -> bool:
    if part(first) is None or part(first) != part(second) or adds_by_index(first):
        return False
    # A reduction joins what has as few elements; what is wider reads its result in a later kernel.
    return first.family != "reduction" or _most_elements(first) >= _most_elements(second)


def _is_whole_first(flow: DataFlow, index: int, op: Op, other: int) -> bool:
    """Whether an operator finds by index what the other one makes, so that all of it must be there before."""
    position = indexed_input(op)
    if position is None or position >= len(flow.sources[index]):
        return False
    source = flow.sources[index][position]
    return source is not None and source[0] == other


def _most_elements(op: Op) -> int:
    return max((spec_elements(spec) for spec in op.outputs), default=0)


def _run(ops: Sequence[Op], flow: DataFlow, members: tuple[int, ...]) -> Run:
    """Bytes across the boundary: all that the members move, less what stays between them."""
    inside = set(members)
    seen: set[tuple[int, int]] = set()
    standing: dict[int, list[TensorSpec]] = {}
    read = written = 0
    for index in members:
        op = ops[index]
        kept = 0
        inputs = zip(op.inputs, flow.sources[index], strict=True)
        for position, (spec, source) in enumerate(inputs):
            if source is None:
                # What was there before the step has no source; who overwrites it waits for its readers.
                readers = [standing[other] for other in flow.waits[index] if other in standing]
                is_kept = any(spec in specs for specs in readers)
                standing.setdefault(index, []).append(spec)
            else:
                is_kept = source[0] in inside or source in seen
                seen.add(source)
            kept += spec_bytes(spec) if is_kept else 0
            if _is_read_again(op, position, is_kept=is_kept):
                read += _least_bytes(ops, spec, source, inside)
        read += max(0, _bytes_read(op) - kept)
        written += op.bytes_written
        for number, spec in enumerate(op.outputs):
            users = flow.users.get((index, number), ())
            is_kept = not users or not inside.issuperset(users)
            # Parameters and states are outputs by role: they stay, also where only the run itself reads them.
            if not is_kept and (
                spec.role == "activation" or any(_overwrites(ops[user], spec) for user in users)
            ):
                written -= spec_bytes(spec)
    return Run(members, read, max(0, written))


def _bytes_read(op: Op) -> int:
    """Bytes from memory: rows of a table that are taken more than once are still on the chip."""
    if not takes_by_index(op):
        return op.bytes_read
    return min(op.bytes_read, sum(map(spec_bytes, op.inputs)))


def _is_read_again(op: Op, position: int, *, is_kept: bool) -> bool:
    """Whether an input is read by a pass of its own besides the one that writes the result."""
    if position < READ_TWICE.get(operator_name(op), 0):
        return True
    # Pooling slides over its input once; a sum over all of it must end before it is used.
    if op.family != "reduction" or not is_kept or "pool" in op.name:
        return False
    return spec_elements(op.inputs[position]) >= LEAST_REDUCED * max(1, _most_elements(op))


def _least_bytes(
    ops: Sequence[Op], spec: TensorSpec, source: tuple[int, int] | None, inside: Collection[int]
) -> int:
    """Bytes of an input as it stands in memory: before the cast that the kernel makes itself."""
    if source is None or source[0] not in inside or "_to_copy" not in ops[source[0]].name:
        return spec_bytes(spec)
    return min(spec_bytes(spec), spec_bytes(ops[source[0]].inputs[0]))


def _overwrites(op: Op, spec: TensorSpec) -> bool:
    """Whether the operator writes a tensor like this one in place."""
    return operator_name(op).endswith("_") and spec in op.outputs
