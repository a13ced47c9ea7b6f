"""Copies between pinned host memory and each GPU, and between every two GPUs, by size."""

import itertools
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.machine import Direction, Link, SizePoint
from ridgeline.machine.quantity import Sampled
from ridgeline.probe.timing import sample

QUICK_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26)
FULL_SIZES = tuple(1 << power for power in range(12, 29, 2))
POINT_S = 0.015
"""Seconds that a visit spends on each size of a link."""
TOTAL_S = 3.0
"""Seconds of a visit to all of them, about: the links of eight GPUs are 72, and each size gets less."""


class LinkName(NamedTuple):
    """A link that can be measured: see `Link`."""

    direction: Direction
    source: int
    target: int


def every_link(num_gpus: int) -> tuple[LinkName, ...]:
    """The links of one process: each GPU with the host, both ways, then every ordered pair of GPUs."""
    gpus = range(num_gpus)
    return (
        *(LinkName("host_to_device", 0, gpu) for gpu in gpus),
        *(LinkName("device_to_host", gpu, 0) for gpu in gpus),
        *(LinkName("device_to_device", a, b) for a, b in itertools.permutations(gpus, 2)),
    )


def measure_links(*, quick: bool) -> tuple[Link, ...]:
    """Size tables of all links between this process's GPUs and pinned host memory.

    One copy at a time runs on one link at a time. Copies between GPUs go peer to peer where the hardware
    lets them and through the host where not; either way the time is that of `Tensor.copy_`.

    Cost: Holds the largest size once in pinned memory and once on every GPU, and frees both.
    """
    sizes = QUICK_SIZES if quick else FULL_SIZES
    names = every_link(torch.cuda.device_count())
    # The number of links grows with the square of the GPUs.
    seconds = min(POINT_S, TOTAL_S / max(1, len(names) * len(sizes)))
    pinned = torch.empty(sizes[-1], dtype=torch.uint8, pin_memory=True, device="cpu")
    on_gpu = [
        torch.empty(sizes[-1], dtype=torch.uint8, device=torch.device("cuda", index))
        for index in range(torch.cuda.device_count())
    ]
    return tuple(_measure(name, pinned, on_gpu, sizes, seconds) for name in names)


def _measure(
    name: LinkName, pinned: Tensor, on_gpu: list[Tensor], sizes: tuple[int, ...], seconds: float
) -> Link:
    direction, source, target = name
    origin = pinned if direction == "host_to_device" else on_gpu[source]
    goal = pinned if direction == "device_to_host" else on_gpu[target]
    # A copy between GPUs runs on the current stream of the one that it leaves, so events there time it.
    with torch.cuda.device(target if direction == "host_to_device" else source):
        table: list[SizePoint] = []
        for size in sizes:
            copy = partial(goal[:size].copy_, origin[:size], non_blocking=True)
            taken = Sampled.measured(sample(copy, seconds=seconds), "s")
            table.append(SizePoint(num_bytes=size, seconds=taken))
    return Link(direction=direction, source=source, target=target, table=tuple(table))
