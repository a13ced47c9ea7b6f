"""What `ridgeline bench memory` finds on a GPU."""

import pytest
import torch

from ridgeline.experiments.memory.gpu import (
    FROM_GPU,
    LAUNCH,
    NEXT_KERNEL,
    NO_OTHER,
    TO_GPU,
    TO_OTHER,
    gpu_latencies,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_launches_and_copies_are_measured() -> None:
    """A kernel in a graph costs less than one that the host launches; a second GPU may be missing."""
    found = {one.name: one for one in gpu_latencies(50)}
    assert list(found) == [LAUNCH, NEXT_KERNEL, TO_GPU, FROM_GPU, TO_OTHER]
    other = found.pop(TO_OTHER)
    assert (other.measured is None) == (torch.cuda.device_count() < 2)
    assert other.reason == (NO_OTHER if other.measured is None else "")
    measured = {name: one.measured for name, one in found.items()}
    assert all(
        one is not None and 0.0 < one.low <= one.value <= one.high for one in measured.values()
    )
    assert measured[NEXT_KERNEL].value < measured[LAUNCH].value
