"""What a step puts under names: an attribute, a list's element, shown to later readers.

A replay writes into the tensors of the capture, and puts nothing under a name. Where a step ran without that
graph in between, or other code put something else there, the name shows another tensor.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.utils import _pytree as pytree

from ridgeline.reach.reach import Reach
from ridgeline.reach.undo import Undo


def renewals(before: Undo) -> list[Callable[[], object]]:
    """Calls that put what is under names now there again, for names under which a step has put tensors.

    Args:
        before: The state before the step.

    Cost: Holds those tensors, so that their memory is not reused.
    """
    return [
        partial(change.put, change.now)
        for change in before.changes()
        if change.put is not None and Reach(change.now).tensors
    ]


def letting_go(before: Undo) -> Callable[[], None]:
    """A call that takes from the tensors that a step has shown what autograd keeps of how they were made.

    That would keep where the gradients of parameters are added up, too, with the stream on which it was made:
    the next step, which makes those tensors again, would add on that stream, and could not be captured. So it
    is for right before that step; what other code has put under a name by then stays.

    Args:
        before: The state before the step that has just run; kept as long as the call is.
    """
    shown = [change.now for change in before.changes()]

    def let_go() -> None:
        for change in before.changes():
            if change.put is None or not any(change.now is one for one in shown):
                continue
            if any(not tensor.is_leaf for tensor in Reach(change.now).tensors):
                change.put(pytree.tree_map_only(Tensor, Tensor.detach, change.now))

    return let_go
