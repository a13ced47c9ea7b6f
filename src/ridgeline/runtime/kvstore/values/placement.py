"""Which of several places holds which part of which key: small keys whole, large ones divided evenly.

And parts of values as tensors, with the state of optimizers that was divided with them.

Whole keys go, the largest of a call first, to the place that has least so far.

Source: Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969 (largest first,
to the least loaded: at most 4/3 of the best there is); MXNet, MXNET_KVSTORE_BIGARRAY_BOUND, for the bound.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.runtime.kvstore.arguments import Key

LARGE_ELEMENTS = 1_000_000
"""Elements from which on a key is divided."""


class ValuePart(NamedTuple):
    """A part of a value: from one row to another, at one place.

    Attributes:
        place: Who holds it.
        start: The first row: of the first dimension, or 0 of a number.
        stop: Behind the last.
    """

    place: int
    start: int
    stop: int


def placed(
    shapes: Mapping[Key, Sequence[int]], loads: Sequence[int], *, divides: bool
) -> dict[Key, tuple[ValuePart, ...]]:
    """The parts of each key, by rows.

    Args:
        shapes: Of the keys.
        loads: Elements that each place holds already.
        divides: Whether large keys may be divided.
    """
    loads, found = [*loads], dict[Key, tuple[ValuePart, ...]]()
    # A stable sort of what all name in one order: all workers place alike without a word.
    order = sorted(shapes, key=lambda key: -math.prod(shapes[key]))
    for key in order:
        size, rows = math.prod(shapes[key]), (shapes[key][0] if len(shapes[key]) else 1)
        if divides and size >= LARGE_ELEMENTS and rows > 1:
            bounds = [rows * place // len(loads) for place in range(len(loads) + 1)]
            parts = tuple(
                ValuePart(place, bounds[place], bounds[place + 1])
                for place in range(len(loads))
                if bounds[place] < bounds[place + 1]
            )
        else:
            parts = (ValuePart(loads.index(min(loads)), 0, rows),)
        for part in parts:
            loads[part.place] += _num_elements(shapes[key], part)
        found[key] = parts
    return found


def loads_of(
    parts: Mapping[Key, Sequence[ValuePart]], shapes: Mapping[Key, Sequence[int]], num_places: int
) -> list[int]:
    """Elements that each place holds."""
    loads = [0] * num_places
    for key, held in parts.items():
        for part in held:
            loads[part.place] += _num_elements(shapes[key], part)
    return loads


def _num_elements(shape: Sequence[int], part: ValuePart) -> int:
    return math.prod(shape[1:]) * (part.stop - part.start)


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
