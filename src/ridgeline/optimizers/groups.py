"""What the groups of an optimizer hold."""

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups, in their order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
