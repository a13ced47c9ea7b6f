"""Learning rates as inputs of a step program."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from ridgeline.errors import CaptureError


class LearningRateInputs:
    """One learning-rate tensor for each group, holding what the optimizer's groups say.

    They lie beside what the groups have: a float is written when it changes, a tensor is copied before each
    step. The optimizer itself is left alone, so it also steps eagerly. On the CPU a float's tensor has 64
    bits, as Python's numbers have.

    Raises:
        CaptureError: a group has no learning rate (an optimizer around others, whose groups have them).
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer = optimizer
        self._known: list[float | None] = []
        self.tensors: list[Tensor] = []
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        for index, group in enumerate(optimizer.param_groups):
            if "lr" not in group:
                raise CaptureError(
                    "wanted a learning rate 'lr' in each parameter group, which one program for the whole "
                    f"step takes as an input, got group {index} of {type(optimizer).__name__} without; put "
                    "it there, or use execution='compiled' or 'eager'"
                )
            rate = group["lr"]
            # Never the group's own tensor: one that is given to an optimizer stands in all of its groups, and
            # the rate that one group gets later would be written into that of the others, or of the script.
            if isinstance(rate, Tensor):
                self.tensors.append(rate.detach().to(device, copy=True))
                self._known.append(None)
            else:
                self.tensors.append(torch.tensor(float(rate), dtype=dtype, device=device))
                self._known.append(float(rate))

    def refresh(self) -> None:
        """Write learning rates that changed.

        Cost: A comparison for each group; where one changed, a fill on the device. A learning rate that is
        a tensor is copied each time, which may wait where it lies on another device than the model.
        """
        groups = self._optimizer.param_groups
        for index, (group, tensor) in enumerate(zip(groups, self.tensors, strict=True)):
            rate = group["lr"]
            if isinstance(rate, Tensor):
                # Not only where it is another one: schedulers write into the tensor that is there.
                tensor.copy_(rate.detach())
                self._known[index] = None
            elif rate != self._known[index]:
                tensor.fill_(rate)
                self._known[index] = rate
