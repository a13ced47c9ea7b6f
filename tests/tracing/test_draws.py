"""Whether a step draws the same random numbers with its channels innermost, as traced, and in truth."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import ridgeline as rl

HEAD = (nn.AdaptiveAvgPool2d(1), nn.Flatten())


def conv() -> nn.Conv2d:
    return nn.Conv2d(3, 3, 3, padding=1)


def plain(model, batch):
    return model(batch).square().mean()


def noisy(model, batch):
    return F.mse_loss(model(batch + torch.randn_like(batch)), batch)


def noisy_rows(model, batch):
    return (model(batch) * torch.rand(len(batch), 1, 1, 1)).square().mean()


@pytest.mark.parametrize(
    ("layers", "loss_fn", "alike"),
    [
        ((conv(), nn.Dropout(0.5), conv()), plain, False),
        ((conv(),), noisy, False),
        ((conv(), *HEAD, nn.Dropout(0.5), nn.Linear(3, 3)), plain, True),
        ((conv(), nn.Dropout2d(0.5), conv()), plain, True),
        ((conv(),), noisy_rows, True),
        ((conv(),), plain, True),
    ],
    ids=["dropout of images", "noise", "dropout of features", "dropout2d", "rows", "nothing"],
)
def test_the_trace_knows_whether_the_same_numbers_land_in_the_same_places(
    layers, loss_fn, alike
) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*layers), torch.randn(4, 3, 8, 8)
    optimizer = optim.SGD(model.parameters(), 0.1)
    traced = rl.trace(model, loss_fn, optimizer, batch, memory_formats=("channels_last",))
    (moved,) = traced.variants
    assert moved.draws_like(traced) is alike

    losses = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(1)
        other = copy.deepcopy(model).to(memory_format=memory_format)
        loss = loss_fn(other, batch.contiguous(memory_format=memory_format))
        losses.append(loss.item())
    assert (abs(losses[0] - losses[1]) < 1e-5) is alike
