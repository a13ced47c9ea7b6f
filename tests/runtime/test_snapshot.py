"""Snapshots: trials leave no trace."""

import copy
import random
from collections import UserDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from ridgeline.optimizers.groups import plain_state
from ridgeline.state.snapshot import Snapshot


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.AdamW(p, torch.tensor(0.1)),
        lambda p: torch.optim.Adagrad(p, 0.1),
    ],
)
def test_training_after_restore_repeats_itself(
    make: Callable[..., torch.optim.Optimizer], steps_before: int
) -> None:
    """Parameters, buffers, optimizer state, settings and random state: the same losses come again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3))
    optimizer = make(model.parameters())
    train(model, optimizer, steps_before)
    snapshot = Snapshot(model, optimizer)
    first = train(model, optimizer, 4)
    optimizer.param_groups[0]["lr"] = 7.0
    optimizer.param_groups[0]["surprise"] = 1
    snapshot.restore()
    assert "surprise" not in optimizer.param_groups[0]
    assert all(p.grad is None for p in model.parameters())
    assert train(model, optimizer, 4) == first


class Pair(torch.optim.Optimizer):
    """One around two others, whose state it shows together; it cannot be assigned."""

    def __init__(self, *members: torch.optim.Optimizer) -> None:
        self.members = members
        self.kind: Callable[..., object] = dict

    @property
    def param_groups(self) -> list[dict[str, object]]:  # type: ignore[override]
        return [group for member in self.members for group in member.param_groups]

    @property
    def state(self) -> object:  # type: ignore[override]
        return self.kind({p: s for member in self.members for p, s in member.state.items()})


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_state_that_cannot_be_assigned_is_read(kind: Callable[..., object]) -> None:
    """Whatever mapping it is."""
    parts = nn.Linear(4, 4), nn.Linear(4, 4)
    pair = Pair(*(torch.optim.SGD(part.parameters(), 0.1, momentum=0.9) for part in parts))
    pair.kind = kind
    for member in pair.members:
        train(parts[0], member, 1)
    assert (
        len([*Snapshot(nn.Sequential(*parts), pair).tensors()]) > len([*parts[0].parameters()]) * 2
    )
    with plain_state(pair):
        assert type(pair.state) is kind


class Remembering(nn.Module):
    """Registers a buffer in its first step, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", x.mean(0))
        self.mean = 0.5 * self.mean + random.random() + np.random.rand()
        return self.linear(x + self.mean)


def test_what_the_first_step_makes_is_made_again() -> None:
    """A buffer that was not there is not there again, and Python's and NumPy's random numbers repeat."""
    torch.manual_seed(0)
    model = Remembering()
    model.again = model.linear.again = nn.Identity()  # a module at several paths
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    snapshot = Snapshot(model, optimizer)
    first = train(model, optimizer, 3)
    model.again.register_buffer("other", torch.ones(1))
    snapshot.restore()
    assert "mean" not in dict(model.named_buffers())
    assert train(model, optimizer, 3) == first


class Scaled(nn.Module):
    """A layer whose buffer is None until its first batch, as `register_buffer` allows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = x.detach().mean()
        return x * self.scale * self.weight


def test_a_buffer_that_was_none_is_none_again() -> None:
    """And not gone: the next step asks for it."""
    model = Scaled()
    snapshot = Snapshot(model, torch.optim.SGD(model.parameters(), 0.1))
    model(torch.ones(3))
    snapshot.restore()
    assert model.scale is None
    assert torch.equal(model(torch.full((3,), 2.0)), torch.full((3,), 4.0))


def test_networks_that_the_loss_reads_are_put_back() -> None:
    """A teacher, a criterion and a default argument: parameters, buffers and gradients, old ones and new."""
    torch.manual_seed(0)
    model, teacher, norm, critic = (
        nn.Linear(4, 3),
        nn.Linear(4, 3),
        nn.BatchNorm1d(3),
        nn.Linear(3, 1),
    )
    critic.bias.grad = torch.ones(1)
    others = (teacher, norm, critic)

    def loss_fn(model: nn.Module, x: torch.Tensor, critic: nn.Module = critic) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        return critic(norm(model(x)) - teacher(x)).mean()

    before = [copy.deepcopy(other.state_dict()) for other in others]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    snapshot = Snapshot(model, optimizer, loss_fn)
    loss_fn(model, torch.randn(8, 4)).backward()
    assert norm.num_batches_tracked == 1
    snapshot.restore()
    for other, state in zip(others, before, strict=True):
        assert all(torch.equal(state[name], now) for name, now in other.state_dict().items())
    assert critic.weight.grad is None
    assert norm.weight.grad is None
    assert torch.equal(critic.bias.grad, torch.ones(1))
    assert model.weight.grad is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_scripted_network_is_put_back() -> None:
    """A teacher that was loaded as TorchScript has parameters and buffers as any other."""
    model, teacher = nn.Linear(4, 3), torch.jit.script(nn.BatchNorm1d(4))
    snapshot = Snapshot(
        model, torch.optim.SGD(model.parameters(), 0.1), lambda model, x: model(teacher(x)).mean()
    )
    teacher(torch.randn(8, 4))
    assert teacher.num_batches_tracked == 1
    snapshot.restore()
    assert teacher.num_batches_tracked == 0


class Teaching(nn.Module):
    """Makes its teacher, with a count of its own, in the first step, and a buffer as long as its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.teacher: nn.Module | None = None
        self.template = nn.Linear(2, 2, device="meta")  # for a functional call; it holds nothing
        self.register_buffer("seen", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.teacher is None:
            self.teacher = nn.Sequential(copy.deepcopy(self.linear), nn.BatchNorm1d(3))
        with torch.no_grad():
            self.seen.resize_(len(x)).fill_(1.0)
            wanted = self.teacher(x)
        result: torch.Tensor = self.linear(x) - wanted
        return result


def test_a_network_that_a_step_makes_begins_each_further_step_alike() -> None:
    """It stays; a tensor without memory has nothing to put back, and a buffer is as short as it was."""
    torch.manual_seed(0)
    model = Teaching()
    optimizer = torch.optim.SGD(model.linear.parameters(), 0.1)
    snapshot = Snapshot(model, optimizer)
    train(model, optimizer, 1)
    snapshot.restore()
    assert model.seen.shape == (0,)
    found = []
    for _ in range(2):
        snapshot.restore()
        found.append(train(model, optimizer, 2))
        assert not [change for change in snapshot.changes_beside() if "template" in change[0]]
    assert found[0] == found[1]
