"""`mlp`: a multilayer perceptron on images, and the task that trains it.

It is small on purpose: a step takes well under a millisecond of computing, so dispatch, launches and
communication latency rule it, which makes it the fast check of everything around the arithmetic.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from ridgeline.runtime.training.task import Task
from ridgeline.tasks.idx import NUM_CLASSES
from ridgeline.tasks.images import count_correct, cross_entropy, load_images

HIDDEN_SIZES = (256, 128)
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def perceptron(
    in_features: int, num_classes: int, *, hidden_sizes: Sequence[int] = HIDDEN_SIZES
) -> nn.Sequential:
    """Flatten, then linear layers with ReLU between them: [N, ...] float32 to logits [N, num_classes]."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = in_features
    for hidden_size in hidden_sizes:
        layers += [nn.Linear(width, hidden_size), nn.ReLU()]
        width = hidden_size
    return nn.Sequential(*layers, nn.Linear(width, num_classes))


def mlp(
    *,
    data_dir: str | Path | None = None,
    batch_size: int = 64,
    hidden_sizes: Sequence[int] = HIDDEN_SIZES,
) -> Task:
    """The task `mlp`: plain SGD with momentum, constant learning rate.

    Args:
        data_dir: Directory with IDX files (MNIST, Fashion-MNIST); None: the bundled digits.
        batch_size: Samples per step over all workers together; the learning rate does not follow.
        hidden_sizes: Width of each hidden layer.

    Raises:
        DataError: The data is missing or damaged.
    """
    data = load_images(data_dir)
    in_features = data.train.images[0].numel()
    return Task(
        name="mlp",
        model=lambda: perceptron(in_features, NUM_CLASSES, hidden_sizes=hidden_sizes),
        loss_fn=cross_entropy,
        optimizer=_sgd,
        train_data=data.train,
        test_data=data.test,
        metric=count_correct,
        batch_size=batch_size,
    )


def _sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
