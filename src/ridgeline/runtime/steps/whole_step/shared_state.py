"""State that a program writes, which has to lie apart from all else that it reads."""

from collections.abc import Sequence

from torch import fx

from ridgeline.capture.operator_writes import written_nodes
from ridgeline.errors import CaptureError
from ridgeline.optimizers.shared_memory import WrittenMemory, sharing
from ridgeline.programs.distinct_results import memory_number
from ridgeline.runtime.steps.whole_step.lifting import StateTensor


def written_state(graph: fx.Graph, state: Sequence[StateTensor]) -> WrittenMemory:
    """The memory of the state that a traced step writes.

    Of two parameters in one memory, an optimizer updates the second behind the first, and a program both from
    what they were.

    Args:
        graph: Of the step; its first inputs are the state.
        state: All of it.

    Raises:
        CaptureError: some of it shares elements with other state; names both.
    """
    nodes = [node for node in graph.nodes if node.op == "placeholder"][: len(state)]
    found = {
        memory_number(each.meta["val"]) for node in graph.nodes for each in written_nodes(node)
    }
    written, read = list[StateTensor](), list[StateTensor]()
    for entry, node in zip(state, nodes, strict=True):
        (written if memory_number(node.meta["val"]) in found else read).append(entry)
    tensors = [entry.tensor for entry in written]
    if (pair := sharing(tensors, [entry.tensor for entry in read])) is not None:
        one, other = (_described([*written, *read][number]) for number in pair)
        raise CaptureError(
            f"wanted state that lies apart from what one program writes, got {one} and {other} in one "
            "memory; give one of them a clone, make two parameters one (b.weight = a.weight), or use "
            "execution='compiled' or 'eager'"
        )
    return WrittenMemory(tensors)


def _described(entry: StateTensor) -> str:
    if entry.role == "constant":
        return f"a tensor of shape {tuple(entry.tensor.shape)} from outside of the model"
    role = "optimizer state" if entry.role == "optimizer" else entry.role
    return f"{role} {entry.name!r}"
