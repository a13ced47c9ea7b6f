"""What a real eager step issues, as torch's profiler sees it: the reference for traced operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile

from ridgeline.workload import Op


def profile_step(
    model: nn.Module, loss_fn: Callable[..., torch.Tensor], optimizer: Optimizer, batch: Any
) -> list[Any]:
    """The outermost profiler events of one training step, in order."""
    optimizer.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        loss_fn(model, batch).backward()
        type(optimizer).step(optimizer)
    outermost = [event for event in profiler.events() if event.cpu_parent is None]
    return sorted(outermost, key=lambda event: event.time_range.start)  # backward may have a thread


def differences(events: Sequence[Any], ops: Sequence[Op]) -> list[str]:
    """Where the traced ops leave the profiler's; empty when they are the same, one by one.

    The profiler also shows what operators call inside. So the tree of events is walked beside the ops:
    an event that is the next op is taken whole; any other must not have a name that is traced
    elsewhere, and is looked into.
    """
    expected = [f"aten::{op.name.split('.')[1]}" for op in ops]
    known = set(expected)
    position = 0
    found: list[str] = []
    stack = list(reversed(events))
    while stack:
        event = stack.pop()
        if position < len(expected) and event.name == expected[position]:
            position += 1
        else:
            if event.name in known:
                found.append(f"{event.name} runs before op {position}")
            stack.extend(reversed(event.cpu_children))
    found += [f"{name} does not run" for name in expected[position:]]
    return found
