"""What a recorded step runs on: a fake twin of the user's objects, or those objects themselves."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Subject:
    """A step's objects.

    Attributes:
        mode: Every call must be made inside of it.
        model: The model.
        optimizer: Over the parameters of `model`.
        batch: The batch, on the device of the model.
        parameters: Parameters of `model` by their first name.
        is_fake: Whether tensors have no data.
        originals: Of a twin: names of the user's own parameters, by their `id`.
    """

    mode: AbstractContextManager[Any]
    model: nn.Module
    optimizer: Optimizer
    batch: Any
    parameters: Mapping[str, Tensor]
    is_fake: bool = True
    originals: Mapping[int, str] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def batch_tensors(self) -> tuple[Tensor, ...]:
        """The tensors of the batch, in the order of its structure."""
        return tensors_of(self.batch)


def itself(model: nn.Module, optimizer: Optimizer, batch: Any) -> Subject:
    """The step on the user's own objects; the batch is moved to the model as training moves it."""
    device = next(model.parameters()).device
    if any(tensor.device != device for tensor in tensors_of(batch)):
        batch = pytree.tree_map_only(Tensor, partial(_to, device), batch)
    return Subject(
        mode=nullcontext(),
        model=model,
        optimizer=optimizer,
        batch=batch,
        parameters=dict(model.named_parameters()),
        is_fake=False,
    )


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device)


def tensors_of(batch: Any) -> tuple[Tensor, ...]:
    """The tensors in a nested structure of tuples, lists and dicts, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def trained_parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]
