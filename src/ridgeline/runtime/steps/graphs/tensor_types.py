"""The types of what a model holds, compared before every step of one that is compiled."""

from collections.abc import Iterable

import torch
from torch import nn


class TensorTypes:
    """Whether parameters and buffers have the types that they had."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._stores = [
            store
            for module in modules
            for store in (module._parameters, module._buffers)  # noqa: SLF001
            # Most modules hold none of one kind, and each costs every step.
            if store
        ]
        self._before = self._now()

    def hold(self) -> bool:
        """Whether no type is another.

        Cost: 0.06 us a tensor.
        """
        return self._now() == self._before

    def _now(self) -> list[torch.dtype]:
        held = (tensor for store in self._stores for tensor in store.values())
        return [tensor.dtype for tensor in held if tensor is not None]
