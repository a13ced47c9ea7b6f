"""What a loss function may return: one number that gradients can start from."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ridgeline.errors import WorkloadError

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
