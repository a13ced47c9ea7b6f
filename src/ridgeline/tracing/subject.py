"""What a recorded step runs on: a fake twin of the user's objects, or those objects themselves."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ridgeline.tensors.batch import to_device


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
        return next(iter(self.model.parameters())).device


def itself(model: nn.Module, optimizer: Optimizer, batch: Any) -> Subject:
    """The step on the user's own objects; the batch is moved to the model as training moves it."""
    return Subject(
        mode=nullcontext(),
        model=model,
        optimizer=optimizer,
        batch=to_device(batch, next(iter(model.parameters())).device),
        parameters=dict(model.named_parameters()),
        is_fake=False,
    )
