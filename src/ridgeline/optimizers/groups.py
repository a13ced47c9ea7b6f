"""What an optimizer holds: its groups, and the entries of its state."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def state_methods(optimizer: Optimizer) -> Any:
    """The class whose methods read an optimizer's state as it is, also where looks at it are refused.

    See `runtime.sync.watched_state`.
    """
    state = optimizer.state
    # An optimizer around others may show theirs by a mapping of another kind.
    return dict if isinstance(state, dict) else type(state)


@contextlib.contextmanager
def plain_state(optimizer: Optimizer) -> Iterator[None]:
    """Inside, its state is a dictionary that nobody watches; for steps that are undone."""
    state = optimizer.state
    # One around others may show theirs, which cannot be assigned.
    if not isinstance(state, dict) or type(state) in (dict, defaultdict):
        yield
        return
    optimizer.state = defaultdict(dict, dict.items(state))
    try:
        yield
    finally:
        optimizer.state = state
