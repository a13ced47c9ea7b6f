"""What an optimizer holds: its groups, and the entries of its state."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@contextlib.contextmanager
def plain_state(optimizer: Optimizer) -> Iterator[None]:
    """Inside, its state is a plain dictionary that nobody watches; for steps that are undone."""
    state = optimizer.state
    if type(state) is not defaultdict:
        optimizer.state = defaultdict(dict, dict.items(state))
    try:
        yield
    finally:
        optimizer.state = state
