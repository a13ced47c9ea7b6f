"""The training loop that everybody writes, as a step: what Ridgeline is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LossFunction = Callable[[nn.Module, Any], Tensor]


class PlainStep:
    """Zero gradients, forward, backward, clipping, optimizer: `loss = step(batch)`.

    Args:
        model: Holds the parameters.
        called: What computes: the model itself, or what wraps, compiles or scripts it.
        loss_fn: `loss_fn(called, batch)` returns the mean loss as a scalar tensor.
        optimizer: Made from the model's parameters.
        precision: `bf16` computes under autocast; anything else as it is.
        begin: Called before each step.
        clip_norm: Clip the gradients to this total norm; None leaves them.
    """

    def __init__(
        self,
        model: nn.Module,
        called: Any,
        loss_fn: LossFunction,
        optimizer: Optimizer,
        *,
        precision: str = "as-is",
        begin: Callable[[], None] | None = None,
        clip_norm: float | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self._called = called
        self._loss_fn = loss_fn
        self._device_type = next(model.parameters()).device.type
        self._is_bf16 = precision == "bf16"
        self._begin = begin
        self._clip_norm = clip_norm

    def __call__(self, batch: Any) -> Tensor:
        """One training step; the detached loss."""
        if self._begin is not None:
            self._begin()
        # To None: zeros would have to be written, read and added to.
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._is_bf16):
            loss = self._loss_fn(self._called, batch)
        loss.backward()
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        return loss.detach()
