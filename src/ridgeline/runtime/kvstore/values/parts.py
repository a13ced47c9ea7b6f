"""Parts of values as tensors, and the state of optimizers that was divided with them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ridgeline.runtime.kvstore.values.placement import ValuePart


def part_of(value: Tensor, part: ValuePart) -> Tensor:
    """The rows of a part, a view; a number is its own."""
    return value[part.start : part.stop] if value.ndim else value


def whole_state(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """State of a value from that of its parts, in order; what is no part of it is the same for all."""
    return {
        name: torch.cat([state[name] for state in states])
        # Counts of steps have no dimension, and are alike in all parts.
        if tensor.ndim and len(states) > 1
        else tensor
        for name, tensor in states[0].items()
    }


def state_of_part(tensor: Tensor, part: ValuePart, shape: Sequence[int]) -> Tensor:
    """What belongs to a part of a state tensor; one without the rows of its value is the same for all.

    Args:
        tensor: Of the state of the whole value.
        part: Of the value.
        shape: Of the value.
    """
    has_rows = tensor.ndim > 0 and len(shape) > 0 and tensor.shape[0] == shape[0]
    return (tensor[part.start : part.stop] if has_rows else tensor).contiguous()
