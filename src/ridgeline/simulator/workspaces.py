"""What operators take for themselves, over the step: measured workspaces at the operators that have them."""

from collections.abc import Mapping, Sequence
from math import prod

from ridgeline.machine import Machine, Setting, Workspace
from ridgeline.simulator.pricing.kept import kept_by_identity
from ridgeline.simulator.pricing.settings import resolve
from ridgeline.workload import Op, Workload


@kept_by_identity(64)
def workspace_bytes(
    machine: Machine,
    workload: Workload,
    setting: Setting,
    *,
    accumulate: int = 1,
    written: Workload | None = None,
) -> tuple[int, ...]:
    """Bytes beside the traced ones while each operator runs; empty where none of them was measured.

    What passes counts at its operator. What is kept counts until the last operator that reads it, a sparse
    gradient to the end. A library's buffers stay for good, once for the thread that runs the backward pass on
    a GPU and once for the other.

    Args:
        machine: Whose timings know the workspaces; of another setting where this one was not measured.
        workload: The step.
        setting: Where it runs.
        written: The step as it is written, where `workload` is the same in another precision. An operator
            that was not measured is expected to take what its equal there took, of the same shapes.
        accumulate: Micro-batches of the step. What is kept is smaller in each, as activations are; copies of
            weights are not, so what passes counts whole.
    """
    known = _known(machine, setting)
    if not known:
        return ()
    ops = workload.ops
    # By key, so that equal operators need one measurement.
    found = [known.get(key) for key in _keys(workload)]
    if written is not None and written is not workload:
        twins = {
            _alike(op): known.get(key) for op, key in zip(written.ops, _keys(written), strict=True)
        }
        found = [space or twins.get(_alike(op)) for op, space in zip(ops, found, strict=True)]
    # Zeros would say that somebody looked.
    if not any(found):
        return ()
    spaces = [space or Workspace() for space in found]
    held = [0] * len(ops)
    for index, last in enumerate(_last_readers(ops, spaces)):
        for position in range(index, last + 1):
            held[position] += -(-spaces[index].kept_bytes // accumulate)
    # Of each thread the largest alone: a library's buffer is made once and used again.
    threads = {False: 0, True: 0}
    for op, space in zip(ops, spaces, strict=True):
        is_backward = op.phase == "backward"
        threads[is_backward] = max(threads[is_backward], space.library_bytes)
    library = sum(threads.values())
    return tuple(
        library + space.passing_bytes + kept for space, kept in zip(spaces, held, strict=True)
    )


def _alike(op: Op) -> tuple[object, ...]:
    """Equal for operators that differ in the types of their tensors alone."""
    return op.name, *(spec.shape for spec in (*op.inputs, *op.outputs))


@kept_by_identity(64)
def _keys(workload: Workload) -> tuple[str, ...]:
    """The operators' keys, which are hashes, for all machines that a search draws."""
    return tuple(op.key for op in workload.ops)


def _known(machine: Machine, setting: Setting) -> Mapping[str, Workspace]:
    measured = [timing for timing in machine.timings if timing.workspace is not None]
    nearest, _ = resolve({timing.setting for timing in measured}, setting, "workspaces")
    return {
        timing.key: timing.workspace
        for timing in measured
        if timing.setting == nearest and timing.workspace is not None
    }


def _last_readers(ops: Sequence[Op], spaces: Sequence[Workspace]) -> list[int]:
    """The last operator during which what each one keeps is there; -1 of one that keeps nothing."""
    readers: dict[int, int] = {}
    for index, op in enumerate(ops):
        readers |= {storage: index for storage, _ in op.memory[: len(op.inputs)]}
    return [
        _last(index, op, readers, len(ops) - 1) if space.kept_bytes else -1
        for index, (op, space) in enumerate(zip(ops, spaces, strict=True))
    ]


def _last(index: int, op: Op, readers: Mapping[int, int], end: int) -> int:
    made = list(zip(op.outputs, op.memory[len(op.inputs) :], strict=False))
    if any(len(spec.stride) != len(spec.shape) for spec, _ in made):
        # Sparse: one of the backward pass is a gradient, which stays. The parts of others are traced where
        # somebody looks at them.
        return end if op.phase == "backward" else index
    unknown = [storage for spec, (storage, _) in made if prod(spec.shape) == 0]
    return max((readers.get(storage, index) for storage in unknown), default=index)
