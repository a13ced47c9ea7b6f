"""The built-in models: their shapes, their size, and that they learn."""

import torch
from torch import nn

from one_thread import one_thread as one_thread
from ridgeline.tasks import load_task
from ridgeline.tasks.images import count_correct, cross_entropy
from ridgeline.tasks.mlp import perceptron
from ridgeline.tasks.resnet18 import ResidualBlock, ResNet18


def test_resnet18_stages() -> None:
    """Stages two to four halve the image; channels go 64, 128, 256, 512."""
    model = ResNet18()
    x = model.stem(torch.zeros(2, 1, 28, 28))
    assert x.shape == (2, 64, 28, 28)
    shapes = []
    for stage in model.stages:
        x = stage(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes == [(64, 28, 28), (128, 14, 14), (256, 7, 7), (512, 4, 4)]


def test_resnet18_size() -> None:
    """The number of parameters is that of the architecture, counted by hand.

    Stem and 16 convolutions 3x3 of the blocks, three 1x1 shortcuts, two numbers per normalised
    channel, and the classifier.
    """
    convolutions = 9 * (1 * 64 + 4 * 64 * 64)
    shortcuts = normalised = 0
    for narrow, wide in ((64, 128), (128, 256), (256, 512)):
        convolutions += 9 * (narrow * wide + 3 * wide * wide)
        shortcuts += narrow * wide
        normalised += 4 * wide
    normalised += 5 * 64
    wanted = convolutions + shortcuts + 2 * normalised + 512 * 10 + 10
    assert sum(p.numel() for p in ResNet18().parameters()) == wanted == 11_171_018


def test_resnet18_colour_and_classes() -> None:
    """Channels in and classes out follow the arguments."""
    assert ResNet18(7, in_channels=3)(torch.zeros(2, 3, 8, 8)).shape == (2, 7)


def test_residual_is_added() -> None:
    """With the last normalisation at zero a block is the rectified shortcut alone."""
    block = ResidualBlock(4, 4)
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(x), x.relu())


def test_perceptron_shape() -> None:
    """Hidden sizes are arguments, from none to many."""
    model = perceptron(512, 2, hidden_sizes=(256, 128))
    assert [tuple(p.shape) for p in model.parameters() if p.dim() == 2] == [
        (256, 512),
        (128, 256),
        (2, 128),
    ]
    assert model(torch.zeros(3, 2, 256)).shape == (3, 2)
    assert len(list(perceptron(4, 2, hidden_sizes=()).parameters())) == 2


def test_loss_is_a_mean_and_metric_a_sum() -> None:
    """The loss of a batch is the mean over samples, the metric the sum, so that parts add up."""
    torch.manual_seed(0)
    model = perceptron(4, 3, hidden_sizes=(5,))
    images, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    halves = [(images[:3], labels[:3]), (images[3:], labels[3:])]
    whole = (images, labels)
    mean = sum(cross_entropy(model, half) for half in halves) / 2
    torch.testing.assert_close(cross_entropy(model, whole), mean)
    assert count_correct(model, whole) == sum(count_correct(model, half) for half in halves)
    assert count_correct(model, whole).dim() == 0


def test_mlp_learns_the_digits() -> None:
    """Ten epochs of the task `mlp` reach an accuracy of 0.93 on the held-out digits."""
    task = load_task("mlp")
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    for _ in range(10):
        for indices in torch.randperm(len(task.train_data)).split(task.batch_size):
            optimizer.zero_grad()
            task.loss_fn(model, task.train_data.batch(indices)).backward()
            optimizer.step()
    with torch.no_grad():
        correct = task.metric(model, task.test_data.batch(torch.arange(len(task.test_data))))
    assert correct / len(task.test_data) >= 0.93


def test_resnet18_overfits_one_batch() -> None:
    """The task `resnet18` drives the loss of one small batch down by ten over its own schedule."""
    task = load_task("resnet18", batch_size=8)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    assert task.scheduler is not None
    scheduler = task.scheduler(optimizer, 12)
    batch = task.train_data.batch(torch.arange(8))
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = task.loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


def test_schedule_of_any_length() -> None:
    """The schedule serves runs of one step and more, and ends far below its peak."""
    task = load_task("resnet18")
    assert task.scheduler is not None
    for num_steps in (1, 2, 3, 10, 69):
        optimizer = task.optimizer(nn.Linear(1, 1))
        scheduler = task.scheduler(optimizer, num_steps)
        rates = []
        for _ in range(num_steps):
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        assert all(rate > 0 for rate in rates)
        if num_steps > 3:
            assert rates[-1] < max(rates) / 1000
