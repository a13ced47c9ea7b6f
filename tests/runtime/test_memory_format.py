"""Channels-last memory: the same step in another order of memory, put back when it is over."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ridgeline.plan import Plan
from ridgeline.runtime.steps.step import PlannedStep
from ridgeline.tensors.memory_format import ChannelsLast


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, bias=False)  # before a norm it would train on noise
        self.norm = nn.BatchNorm2d(8)
        self.register_buffer("mask", torch.ones(1, 8, 6, 6))
        self.out = nn.Linear(8 * 36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.norm(self.conv(x)).relu() * self.mask).flatten(1))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def train(plan: Plan, optimizer: str) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = Net().double()
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    batches = [(torch.randn(4, 3, 8, 8).double(), torch.randint(0, 4, (4,))) for _ in range(6)]
    with PlannedStep(model, loss_fn, made, plan, device="cpu") as step:
        losses = [float(step(batch)) for batch in batches]
        if plan.memory_format == "channels_last":
            assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    return losses, model


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_the_maths_is_that_of_the_plain_step(optimizer: str) -> None:
    """Losses and parameters agree to rounding, and afterwards every tensor lies as it did."""
    plain, plainly = train(Plan(), optimizer)
    last, lastly = train(Plan(memory_format="channels_last"), optimizer)
    assert last == pytest.approx(plain, rel=1e-12)
    for mine, other in zip(lastly.parameters(), plainly.parameters(), strict=True):
        assert mine.stride() == other.stride()
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


def test_state_lies_like_its_parameter() -> None:
    """Momentum that exists is converted with the weight, and back; references to both stay good."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn(model, (torch.randn(4, 3, 8, 8), torch.zeros(4, dtype=torch.long))).backward()
    optimizer.step()
    weight, momentum = model.conv.weight, optimizer.state[model.conv.weight]["momentum_buffer"]
    values = copy.deepcopy((weight.data, momentum))
    last = ChannelsLast(model, optimizer)
    assert weight.stride() == momentum.stride() == (27, 1, 9, 3)
    last.close()
    last.close()
    assert weight.stride() == momentum.stride() == (27, 9, 3, 1)
    assert torch.equal(weight, values[0])
    assert torch.equal(momentum, values[1])


def test_only_images_are_converted() -> None:
    """Labels, tokens and videos stay as they are; so does an image that lies that way already."""
    image = torch.randn(2, 3, 4, 4)
    batch = {"x": image, "y": torch.zeros(2, dtype=torch.long), "video": torch.randn(2, 3, 4, 4, 4)}
    last = ChannelsLast(Net(), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    found = last.batch(batch)
    assert found["x"].stride() == (48, 1, 12, 3)
    assert torch.equal(found["x"], image)
    assert found["y"] is batch["y"]
    assert found["video"] is batch["video"]
    assert last.batch(found)["x"].data_ptr() == found["x"].data_ptr()
