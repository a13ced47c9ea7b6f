"""Evaluation: the task's metric over the test data, each worker taking its part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ridgeline.runtime.training.fetching import fetch
from ridgeline.runtime.training.sampler import equal_parts, length
from ridgeline.state import random_state
from ridgeline.tensors.batch import to_device
from ridgeline.workers.agree import sum_over_workers
from ridgeline.workers.world import World


def evaluate(
    model: nn.Module,
    metric: Callable[[nn.Module, Any], Tensor],
    dataset: Dataset[Any],
    *,
    batch_size: int,
    world: World,
) -> float:
    """Mean metric per sample over the whole data set, the same on every worker.

    The model is in eval mode meanwhile. Each of its modules then has its own mode again, which a task may
    have chosen (a frozen batch norm stays in eval mode), and the generators have the state they had: what
    the metric or the data set draws changes no step of training.

    Args:
        model: On the worker's device.
        metric: `metric(model, batch)` returns the sum over the batch, as a scalar tensor.
        dataset: Map-style; every sample is used once, whatever the number of workers.
        batch_size: Samples at a time, per worker.
        world: This worker's place.

    Raises:
        DataError: the data set is empty or has no length.

    Cost: One all-reduce at the end, and a copy of the generators' state; waits for the device.
    """
    count = length(dataset, "test data")
    mine = equal_parts(count, world.size)[world.rank]
    # In double precision, which counts on; single stops at 16.7 million correct predictions.
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    modes = [(module, module.training) for module in model.modules()]
    drawn = random_state.capture(world)
    model.eval()
    try:
        # Not inference_mode: what a model caches from there could never be used in training again.
        with torch.no_grad():
            for begin in range(mine.start, mine.stop, batch_size):
                indices = torch.arange(begin, min(begin + batch_size, mine.stop), device="cpu")
                total += metric(model, to_device(fetch(dataset, indices), world.device))
    finally:
        # Not `model.train()`, which puts every module into the mode of the outermost one.
        for module, is_training in modes:
            module.training = is_training
        random_state.apply(drawn, world)
    return float(sum_over_workers(total, world)) / count
