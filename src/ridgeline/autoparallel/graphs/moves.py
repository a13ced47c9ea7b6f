"""Moves to the CPU that a function makes itself (`y.cpu()`), without the host waiting for them.

As written such a move goes into pageable memory, and the host waits for all that the device has to do before
it. Into pinned memory it is merely enqueued; who must then wait for it, and where, is decided in `transfers`.
"""

from collections.abc import Collection

import torch
from torch import Tensor, fx

from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.graphs.segments import (
    Environment,
    Segment,
    SegmentSource,
    compile_segment,
)


def is_move(node: fx.Node) -> bool:
    """Whether a node copies a tensor from a device to the CPU, and that is all.

    A change of the dtype on the way is not: torch makes it on the CPU, so results could differ from a
    change on the device; such a node runs as it is.
    """
    if str(node.target) != "aten._to_copy.default":
        return False
    (argument,) = node.all_input_nodes
    value, result = argument.meta.get("val"), node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and isinstance(result, Tensor)
        and value.device.type != "cpu"
        and result.device.type == "cpu"
        and value.layout == result.layout == torch.strided
        and value.dtype == result.dtype
    )


def compile_move(program: Program, index: int, keep: Collection[int]) -> Segment:
    """An operation that `is_move`, enqueued on the current stream: what it fills is there once that is done.

    Slots in `keep` are filled though nothing else reads them.
    """
    operation = program.operations[index]
    node, slot_of = operation.node, program.slot_of
    place = operation.members.index(node)
    (argument,) = node.all_input_nodes
    source, slot = slot_of[argument], slot_of[node]
    wanted = {*keep, *program.outputs, *program.users}
    exported = frozenset(wanted.intersection(operation.makes))
    name = f"move of {argument.name}"
    # In three parts, since the copy in the middle is made by `begin_copy` and not by the operator of the
    # trace.
    before = compile_segment(
        SegmentSource(operation.members[:place], slot_of, frozenset({source}), frozenset()), name
    )
    # Views of the result look at memory that is not filled yet; they do not read it.
    after = compile_segment(
        SegmentSource(operation.members[place + 1 :], slot_of, exported, frozenset()), name
    )
    given = node.kwargs.get("memory_format")
    memory_format = given if isinstance(given, torch.memory_format) else torch.preserve_format

    def segment(environment: Environment) -> None:
        before(environment)
        environment[slot] = begin_copy(environment[source], memory_format)
        after(environment)
        # Only the views behind it are read, and hold the memory themselves.
        if slot not in exported:
            environment[slot] = None

    return segment


def begin_copy(value: Tensor, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
    """A copy in pinned memory, laid out as `Tensor.to` does, that is complete once the current stream is.

    The value stays unchanged, and its memory in use, until then.

    Cost: Enqueues one copy; one more on the device where layouts differ. The first ones of a size also
        allocate pinned memory, which torch keeps for later ones.
    """
    is_gpu = value.device.type == "cuda"
    there = torch.empty_like(value, device="cpu", memory_format=memory_format, pin_memory=is_gpu)
    # Only equal layouts are one copy; all else torch finishes on the host, which then waits, or for
    # conjugates does not and finishes what has not come yet.
    if value.stride() != there.stride() or value.is_conj() or value.is_neg():
        value = torch.empty_like(value, memory_format=memory_format).copy_(value)
    return there.copy_(value, non_blocking=True)
