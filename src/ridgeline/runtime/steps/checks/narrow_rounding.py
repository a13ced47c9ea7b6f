"""What rounding to 16 bits does to a step, where the user's own code computes in them.

A plan that casts can be compared with the step in single precision; what the user casts cannot be undone. So
the step runs again from parameters that are moved, each by chance, within what such a cast rounds away.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

HALF_STEP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
"""Half of the distance between neighbours, relative: 8 and 11 bits of significand. Source: IEEE 754 for
float16, https://en.wikipedia.org/wiki/Bfloat16_floating-point_format for the other."""


class NarrowTypes(TorchDispatchMode):
    """Watches the operators inside for results of 16 bits.

    Attributes:
        half_step: The largest rounding among them, relative; 0 where there are none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.half_step = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.half_step = max(self.half_step, HALF_STEP.get(leaf.dtype, 0.0))
        return result


def move_within_rounding(parameters: Any, half_step: float, seed: int) -> None:
    """Move each element of parameters that are trained by a random part of what a cast rounds away.

    The random state stays as it is.
    """
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            if parameter.requires_grad and parameter.is_floating_point():
                generator = torch.Generator(parameter.device).manual_seed(seed + index)
                # In 32 bits: draws in 16 are as coarse as the rounding that they are to stay within.
                chance = torch.rand(
                    parameter.shape,
                    generator=generator,
                    device=parameter.device,
                    dtype=torch.float32,
                )
                parameter.mul_(1.0 + half_step * (2.0 * chance.to(parameter.dtype) - 1.0))
