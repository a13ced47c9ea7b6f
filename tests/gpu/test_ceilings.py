"""Rates of small kernels are those of the GPU, not of a host that issues them one by one."""

import statistics

import pytest
import torch

from ridgeline.probe.gpu import kernel_samples
from ridgeline.probe.timing import sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.quiet,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_small_kernel_takes_less_than_its_launch() -> None:
    """A sum of 16 KiB is launched in microseconds and done in one; a large one takes as long either way."""
    small, large = (torch.ones(n, device="cuda") for n in (1 << 12, 1 << 28))
    queued_s = statistics.median(kernel_samples(lambda: small.add_(1.0), seconds=0.02))
    issued_s = statistics.median(sample(lambda: small.add_(1.0), seconds=0.02))
    assert 0.0 < queued_s < 0.8 * issued_s
    queued_s = statistics.median(kernel_samples(lambda: large.add_(1.0), seconds=0.02))
    issued_s = statistics.median(sample(lambda: large.add_(1.0), seconds=0.02))
    assert queued_s == pytest.approx(issued_s, rel=0.1)
