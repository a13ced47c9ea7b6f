"""What a loss function may return: one number that gradients can start from, and from which they go back."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ridgeline.errors import SideEffectError, WorkloadError
from ridgeline.reach.reach import Reach, node_of
from ridgeline.reach.undo import load

_OWN_BACKWARD = (
    "wanted a loss_fn that returns the loss with its graph, got one that calls backward itself; leave "
    "backward(), step() and zero_grad() out of it: the training step does them (a part of the loss may go "
    "backward there, if the rest is returned)"
)


def have_gradients(parameters: Iterable[Tensor]) -> bool:
    """Whether any of them has a gradient, which behind a loss function is one that it has computed itself."""
    return any(p.grad is not None for p in parameters)


def start_backward(loss: Tensor, *, has_gradients: bool = False, keeps_graph: bool = False) -> None:
    """The backward pass from a loss.

    Args:
        loss: The result of `scalar_loss`.
        has_gradients: The loss function has left gradients, see `have_gradients`.
        keeps_graph: Gradients can be differentiated again, as an optimizer may want to.

    Raises:
        WorkloadError: its graph is used up, since the loss function called backward itself.
    """
    try:
        loss.backward(create_graph=keeps_graph)
    except RuntimeError as error:
        # Without such gradients it is a state that was not detached, of which torch's own message tells.
        if has_gradients and "backward through the graph a second time" in str(error):
            raise WorkloadError(_OWN_BACKWARD) from error
        raise


def scalar_loss(loss: Any, *, has_gradients: bool = False) -> Tensor:
    """The loss as a 0-d tensor; one of any shape with a single element is taken, as `backward` takes it.

    Args:
        loss: What the loss function returned.
        has_gradients: It has left gradients, see `have_gradients`.

    Raises:
        WorkloadError: it is no tensor, has other than one element, or depends on no parameter.
    """
    if not isinstance(loss, Tensor):
        raise WorkloadError(
            f"wanted a scalar loss tensor, got {type(loss).__name__} from loss_fn; return the loss tensor "
            "itself"
        )
    if loss.numel() != 1:
        raise WorkloadError(
            f"wanted a scalar loss tensor, got shape {tuple(loss.shape)} from loss_fn; reduce it, for "
            "example with .mean()"
        )
    if not loss.requires_grad and has_gradients:
        raise WorkloadError(_OWN_BACKWARD)
    if not loss.requires_grad:
        raise WorkloadError(
            "wanted a loss that depends on the parameters, got one without gradient from loss_fn; remove "
            "no_grad or detach, and leave at least one parameter trainable"
        )
    return loss.reshape(()) if loss.dim() else loss


class EarlierGraphs:
    """Results, within the reach of a step, of operators that ran before it.

    A loss that goes back through them (log probabilities that a policy keeps while it acts) does so once: the
    backward pass frees what they have saved. Others are leftovers that no step reads.

    Args:
        roots: Model, loss function, optimizer and batch, before the step.

    Cost: That of `Reach`.
    """

    def __init__(self, *roots: Any) -> None:
        reach = Reach(*roots)
        made = [(node, t) for t in reach.tensors if (node := node_of(t)) is not None]
        # Named now, since the step may empty what holds them.
        self._made = {node: " and ".join(dict.fromkeys(_names(reach, t))) for node, t in made}

    def refuse_in(self, loss: Tensor) -> None:
        """Raise if the graph of a loss, which was not gone back yet, is in part an earlier one.

        Raises:
            SideEffectError: names where its result is kept.
        """
        if not self._made:
            return
        pending, seen = [loss.grad_fn], set[Any]()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in self._made:
                raise SideEffectError(
                    "wanted a step that can be run again, got a loss that goes back through what was "
                    f"computed before it (kept in {self._made[node] or 'the batch'}), which one backward "
                    "pass frees; compute it within the loss function, or use execution='eager'"
                )
            pending.extend(following for following, _ in node.next_functions)


def _names(reach: Reach, value: Any) -> Iterator[str]:
    """What holds an object, or a container of it, is called by."""
    named = [
        (str(key), held) for s in reach.stores if isinstance(s, dict) for key, held in s.items()
    ]
    named += [(cell.label, load(cell)) for cell in reach.cells]
    for name, held in named:
        if _holds(held, value, levels=2):
            yield name


def _holds(held: Any, value: Any, *, levels: int) -> bool:
    """Whether an object is another one, or holds it in a list or tuple, or in one inside of that."""
    inside: Iterable[Any] = held if levels and isinstance(held, (list, tuple)) else ()
    return held is value or any(_holds(one, value, levels=levels - 1) for one in inside)
