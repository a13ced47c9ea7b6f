"""In which order each algorithm adds: models on the values of all workers, to be equal bit for bit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ridgeline.runtime.sync.transports.ring import Cut


def along_ring(values: Sequence[Tensor], order: Sequence[int], pieces: int) -> Tensor:
    """Share i begins at the worker in place i of the ring, and each following one adds its own."""
    size, found = len(order), torch.empty_like(values[0])
    cut = Cut.of(values[0].numel(), size, pieces)
    for share in range(size):
        begin, end = share * cut.share, min((share + 1) * cut.share, cut.num_elements)
        if begin < end:
            total = values[order[share]][begin:end].clone()
            for step in range(1, size):
                total = values[order[(share + step) % size]][begin:end] + total
            found[begin:end] = total
    return found


def up_tree(values: Sequence[Tensor]) -> Tensor:
    """Neighbours first, then neighbours of those, towards worker 0."""
    rows, step = [value.clone() for value in values], 1
    while step < len(rows):
        for place in range(0, len(rows) - step, 2 * step):
            rows[place] = rows[place] + rows[place + step]
        step *= 2
    return rows[0]


def by_pairs(values: Sequence[Tensor]) -> Tensor:
    """Two hosts of two workers: inside, then between."""
    first, second, third, fourth = values
    return (first + second) + (third + fourth)
