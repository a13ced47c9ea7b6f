"""What is told of looks into an optimizer's state, and who may look all the same."""

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ridgeline as rl
from ridgeline.errors import WorkloadError
from ridgeline.optimizers.capturable import make_capturable
from ridgeline.runtime.sync.late_hooks import check_step_is_plain
from ridgeline.runtime.sync.watched_state import WatchedState, unwatch_state, watch_state
from ridgeline.tensors.memory_format import ChannelsLast
from ridgeline.tensors.sameness import Sameness


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    # What fake tensors do not know has the step run.
    return model(batch).square().mean() * (1 + int(batch.sum() > 0))


def clip(optimizer: Optimizer, *_: Any) -> None:
    """Stands for what looks at gradients before a step."""


def test_each_look_is_told() -> None:
    """By its key, or None where it is at all; an entry that is there is read by its key unheard."""
    told: list[Any] = []
    one, other = torch.zeros(1), torch.zeros(2)

    def look(key: Any, *, writes: bool = False) -> None:
        told.append((None if key is None else tuple(key.shape), writes))

    state = WatchedState({one: {"step": 1}}, look)
    assert state[one] == {"step": 1}
    assert not told
    assert other not in state
    assert state.get(other) is state.pop(other, None) is None
    state[other] = {}
    assert len(state) == len([*state.values()]) == 2
    assert told == [((2,), False)] * 3 + [((2,), True)] + [(None, False)] * 2
    for plain in (copy.copy(state), copy.deepcopy(state), state.copy()):
        assert type(plain) is defaultdict
        assert [*plain.values()] == [{"step": 1}, {}]


def test_steps_that_are_undone_look_at_a_plain_state() -> None:
    """A trace that runs a step asks nobody, and leaves the state watched."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    def look(key: Any, *, writes: bool = False) -> None:
        raise AssertionError((key, writes))

    watch_state(optimizer, look)
    watched = optimizer.state
    rl.trace(model, loss_fn, optimizer, torch.ones(4, 3), may_run=True)
    assert optimizer.state is watched
    assert not dict.__len__(watched)
    unwatch_state(optimizer, look)
    assert type(optimizer.state) is defaultdict


def test_what_lays_out_memory_and_watches_graphs_is_not_told_of() -> None:
    """Reading the state of parts, or what a store left, is then no look of a script."""
    model = nn.Conv2d(2, 3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    loss_fn(model, torch.ones(1, 2, 4, 4)).backward()
    optimizer.step()

    def look(key: Any, *, writes: bool = False) -> None:
        raise AssertionError((key, writes))

    watch_state(optimizer, look)
    ChannelsLast(model, optimizer).close()
    make_capturable(optimizer, torch.device("cpu"))
    same = Sameness()
    same.entries(optimizer.state)
    is_same = same.compiled()
    assert is_same()
    dict.__delitem__(optimizer.state, model.bias)
    assert not is_same()


def test_hooks_of_all_optimizers_are_refused() -> None:
    """As those of the optimizer itself, where a step would find no whole gradients."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    check_step_is_plain(optimizer, "kvstore", "why")
    handle = register_optimizer_step_pre_hook(clip)
    try:
        with pytest.raises(
            WorkloadError, match="wanted an optimizer without hooks before its step"
        ):
            check_step_is_plain(optimizer, "kvstore", "why")
    finally:
        handle.remove()
