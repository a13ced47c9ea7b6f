"""`Task`: what the main job trains: a model, its loss, its data and its metric."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training job, complete but for the machine.

    Attributes:
        name: Short name for reports.
        model: Makes the model, on the CPU; called after the random seed is set.
        loss_fn: `loss_fn(model, batch)` returns the mean loss of the batch as a scalar tensor.
        optimizer: Makes the optimizer of a model.
        train_data: Map-style dataset; samples are collated by torch's default rules.
        test_data: Likewise, for the metric.
        metric: `metric(model, batch)` returns the *sum* over the batch of what is to be averaged
            (correct predictions, say), as a scalar tensor.
        batch_size: Samples per step over all workers together, so that the maths does not depend on
            the number of workers.
        clip_norm: Gradients are scaled down to this total norm, finite and above 0; None leaves them.
        scheduler: Makes the learning-rate scheduler from the optimizer and the number of steps of the
            whole run; stepped after every step. None: constant.
    """

    name: str
    model: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    train_data: Dataset[Any]
    test_data: Dataset[Any]
    metric: Callable[[nn.Module, Any], Tensor]
    batch_size: int = 64
    clip_norm: float | None = None
    scheduler: Callable[[Optimizer, int], torch.optim.lr_scheduler.LRScheduler] | None = None
