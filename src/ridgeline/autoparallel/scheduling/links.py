"""Seconds of a copy between two devices: from the machine's measured links, or measured here and now."""

import statistics
from collections.abc import Sequence
from functools import partial

import torch

from ridgeline.autoparallel.scheduling.placement import LinkSeconds
from ridgeline.machine import Machine
from ridgeline.recording.turns import call_s, wait_for

SIZES = (1 << 16, 1 << 25)
"""Two sizes give a latency and a rate."""
COPIES = 5


def link_seconds(devices: Sequence[torch.device], machine: Machine | None) -> LinkSeconds:
    """Seconds to copy from device i to device j: `link_seconds(i, j, num_bytes)`.

    Without a machine every pair is measured now.

    Raises:
        MachineError: the machine has no figures for a pair.

    Cost: Without a machine some ten copies of 32 MiB a pair, and a wait for the devices.
    """
    if machine is not None:
        names = [_name(device) for device in devices]
        return lambda source, target, num_bytes: machine.link_seconds(
            names[source], names[target], int(num_bytes)
        )
    figures = {
        (i, j): _measure(devices[i], devices[j])
        for i in range(len(devices))
        for j in range(len(devices))
        if i != j
    }

    def seconds(source: int, target: int, num_bytes: float) -> float:
        if source == target:
            return 0.0
        latency_s, seconds_per_byte = figures[source, target]
        return latency_s + seconds_per_byte * num_bytes

    return seconds


def _measure(source: torch.device, target: torch.device) -> tuple[float, float]:
    """Latency in seconds, and seconds a byte."""
    small, large = (_copy_s(source, target, size) for size in SIZES)
    rate = max(0.0, large - small) / (SIZES[1] - SIZES[0])
    # Noise can make the small copy faster than the rate allows; a negative latency would make copies free.
    return max(0.0, small - rate * SIZES[0]), rate


def _copy_s(source: torch.device, target: torch.device, num_bytes: int) -> float:
    data = torch.empty(num_bytes, dtype=torch.uint8, device=source)
    # A move to the CPU goes into pinned memory; what comes from there is as it is.
    pins = source.type == "cuda" and target.type == "cpu"
    there = torch.empty(num_bytes, dtype=torch.uint8, device=target, pin_memory=pins)
    copy = partial(there.copy_, data, non_blocking=True)
    samples = [call_s(copy, 1, partial(wait_for, source, target)) for _ in range(COPIES + 1)]
    # The first copy pays for setting up peer access and mapping memory, and is left out.
    return statistics.median(samples[1:])


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}"
