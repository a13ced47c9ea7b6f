"""What a loss function may return: one number that gradients can start from."""

from typing import Any

from torch import Tensor

from ridgeline.errors import WorkloadError


def scalar_loss(loss: Any) -> Tensor:
    """The loss as a 0-d tensor; one of any shape with a single element is taken, as `backward` takes it.

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
    if not loss.requires_grad:
        raise WorkloadError(
            "wanted a loss that depends on the parameters, got one without gradient from loss_fn; remove "
            "no_grad or detach, and leave at least one parameter trainable"
        )
    return loss.reshape(()) if loss.dim() else loss
