"""What a GPU of this host costs its processor: a launch, and a megabyte over the link."""

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.experiments.contests import captured
from ridgeline.experiments.memory.result import Latency
from ridgeline.machine import Quantity
from ridgeline.recording.turns import call_s

NUM_BYTES = 1_000_000
NODES = 1000
"""Kernels of the graph that is replayed: enough that what a replay itself costs is below 1 % of them."""
WARMUPS = 20
LAUNCH = "Launch of a kernel, until it is seen to be done"
NEXT_KERNEL = "Next kernel of a replayed graph"
TO_GPU, FROM_GPU, TO_OTHER = "1 MB to a GPU", "1 MB from a GPU", "1 MB to another GPU"
TEXTBOOK_S = {LAUNCH: 10e-6, TO_GPU: 80e-6, FROM_GPU: 80e-6, TO_OTHER: 30e-6}
"""Over PCIe 3 x16, and over NVLink between GPUs. Source: Dive into Deep Learning, 12.4."""
NO_GPU, NO_OTHER = "there is no GPU", "there is no second GPU"


def gpu_latencies(num_samples: int) -> tuple[Latency, ...]:
    """Each once the host has seen it done; those of hardware that is not there say so.

    Cost: Synchronises the GPU; 2 MB of its memory and 1 MB of pinned memory.
    """
    if not torch.cuda.is_available():
        return tuple(
            _row(name, "", None, NO_GPU)
            for name in (LAUNCH, NEXT_KERNEL, TO_GPU, FROM_GPU, TO_OTHER)
        )
    number = torch.zeros(1, device="cuda")
    here = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda")
    return (
        _row(
            LAUNCH,
            "PyTorch adds to one number; its dispatch is part of it",
            _timed(lambda: number.add_(1.0), num_samples),
        ),
        _row(
            NEXT_KERNEL, f"a CUDA graph of {NODES} of these, over {NODES}", _replayed(num_samples)
        ),
        _row(TO_GPU, "from pinned memory", _copied(here, there, num_samples)),
        _row(FROM_GPU, "to pinned memory", _copied(there, here, num_samples)),
        _to_other(there, num_samples),
    )


def _to_other(there: Tensor, num_samples: int) -> Latency:
    if torch.cuda.device_count() < 2:
        return _row(TO_OTHER, "", None, NO_OTHER)
    other = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:1")
    is_direct = torch.cuda.can_device_access_peer(0, 1)
    how = "directly" if is_direct else "through the host: neither GPU reaches the other"
    return _row(TO_OTHER, how, _copied(there, other, num_samples))


def _row(name: str, how: str, measured: Quantity | None, reason: str = "") -> Latency:
    return Latency(
        name=name, textbook_s=TEXTBOOK_S.get(name), measured=measured, reason=reason, how=how
    )


def _copied(source: Tensor, target: Tensor, num_samples: int) -> Quantity:
    return _timed(lambda: target.copy_(source, non_blocking=True), num_samples)


def _replayed(num_samples: int) -> Quantity:
    """One kernel of a graph of them in a chain, each waiting for the one before."""
    number = torch.zeros(1, device="cuda")
    graph, _ = captured(lambda: [number.add_(1.0) for _ in range(NODES)])
    # One replay is a thousand kernels, so that a tenth of the samples does.
    whole = _timed(graph.replay, max(num_samples // 10, 5))
    return whole.times(1.0 / NODES)


def _timed(start: Callable[[], object], num_samples: int) -> Quantity:
    """Seconds from the call until the host has seen the GPU done."""
    samples = [call_s(start, 1, torch.cuda.synchronize) for _ in range(WARMUPS + num_samples)]
    # The first ones load the kernel, and find clocks and links asleep.
    return Quantity.measured(samples[WARMUPS:], "s")
