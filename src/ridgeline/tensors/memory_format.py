"""Channels-last memory for a training step: images and convolution weights with their channels innermost.

The values stay; only the order in memory changes, for which the fastest convolution kernels are written.
Parameters, buffers and optimizer state are converted in place, so every reference to them stays good.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

Strides = tuple[int, ...]


class ChannelsLast:
    """Tensors of a step in channels-last memory, until `close`.

    Args:
        model: Its parameters and buffers of four dimensions are converted in place.
        optimizer: State that is kept like its parameter is converted too.

    Cost: Copies what it converts, once; and each batch that comes in another order.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._found: dict[int, tuple[Tensor, Strides]] = {}
        for tensor in (*model.parameters(), *model.buffers()):
            self._convert(tensor)
        self.adopt_state()

    def adopt_state(self) -> None:
        """Convert optimizer state that is not converted yet, such as what was loaded since."""
        for tensor in _state_like_parameters(self._optimizer):
            self._convert(tensor)

    def batch(self, batch: Any) -> Any:
        """The batch with its images in channels-last memory; others as they are."""
        return pytree.tree_map_only(Tensor, in_channels_last, batch)

    def close(self) -> None:
        """Put every tensor back into the order that it had; safe to call twice."""
        with torch.no_grad():
            for tensor, strides in self._found.values():
                if tensor.stride() != strides:
                    _lay_out(tensor, strides)
            # State that was made meanwhile took the strides of its parameter, and is not among what was
            # converted.
            for tensor in _state_like_parameters(self._optimizer, unlike=True):
                _lay_out(tensor, tensor.new_empty(tensor.shape).stride())
        self._found.clear()

    def _convert(self, tensor: Tensor) -> None:
        if not _is_image(tensor) or tensor.is_contiguous(memory_format=torch.channels_last):
            return
        self._found[id(tensor)] = (tensor, tensor.stride())
        with torch.no_grad():
            # By `.data`: the parameter has to stay the object that optimizer and hooks know.
            tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)


def _lay_out(tensor: Tensor, strides: Strides) -> None:
    tensor.data = tensor.data.new_empty_strided(tensor.shape, strides).copy_(tensor.data)


def in_channels_last(tensor: Tensor) -> Tensor:
    """The tensor in channels-last memory where it is an image or a convolution's weight, else as it is."""
    if not _is_image(tensor):
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _is_image(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and tensor.is_floating_point()
    return is_dense and tensor.dim() == 4 and tensor.shape[1] > 0


def _state_like_parameters(optimizer: Optimizer, *, unlike: bool = False) -> Iterator[Tensor]:
    """State of the shape of its parameter; with `unlike` that in another order of memory."""
    kept = optimizer.state
    # As it is, also where looks at it are refused.
    for parameter, state in dict.items(kept) if isinstance(kept, dict) else kept.items():
        for value in state.values() if isinstance(state, dict) else ():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if not unlike or (_is_image(value) and value.stride() != parameter.stride()):
                yield value
