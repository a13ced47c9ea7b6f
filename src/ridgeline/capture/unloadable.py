"""Tensors of batches that cannot be copied to where a graph reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.capture.interception import is_special

WITH_GRADIENTS = "batches that want gradients themselves ran without a graph"
OF_OTHER_CLASSES = "batches with subclasses of Tensor ran without a graph"
WITH_SPARSE = (
    "batches with sparse tensors, which no graph can copy to where it reads, ran without one"
)
OF_INFERENCE = "batches made in inference mode, which autograd refuses to save, ran without a graph"


def cannot_be_loaded(tensor: Tensor) -> bool:
    """Whether it is such a tensor."""
    return (
        tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.is_inference()
        or is_special(tensor)
    )


def why_not_loaded(tensors: Sequence[Tensor]) -> str:
    """What keeps a batch out of a graph; empty if nothing does."""
    if any(tensor.requires_grad for tensor in tensors):
        return WITH_GRADIENTS
    if any(map(is_special, tensors)):
        return OF_OTHER_CLASSES
    if any(tensor.is_inference() for tensor in tensors):
        return OF_INFERENCE
    return WITH_SPARSE if any(map(cannot_be_loaded, tensors)) else ""
