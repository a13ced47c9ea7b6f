"""Loss and metric of the built-in classifiers; a batch is (images, labels)."""

from torch import Tensor, nn
from torch.nn import functional as F


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of a batch: images [N, C, H, W] float32, labels [N] int64, to a scalar."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def count_correct(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Number of images whose likeliest class is their label, as a scalar int64 tensor."""
    images, labels = batch
    return (model(images).argmax(dim=1) == labels).sum()
