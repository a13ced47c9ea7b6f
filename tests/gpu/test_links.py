"""The link matrix on GPUs: every link has a table whose times are those of a real wire."""

import pytest
import torch

from ridgeline.probe.links import QUICK_SIZES, every_link, measure_links

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_every_link_is_measured_and_large_copies_are_as_fast_as_wires_are() -> None:
    """All sizes, each link once; 64 MiB go at 0.5 to 2,000 GB/s, and take longer than 4 KiB."""
    links = measure_links(quick=True)
    found = [(link.direction, link.source, link.target) for link in links]
    assert found == list(every_link(torch.cuda.device_count()))
    for link in links:
        assert tuple(point.num_bytes for point in link.table) == QUICK_SIZES
        rate = link.table[-1].num_bytes / link.table[-1].seconds.value
        assert 0.5e9 < rate < 2e12, link.ends
        assert link.table[-1].seconds.value > link.table[0].seconds.value, link.ends


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_both_directions_between_two_gpus_are_about_as_fast() -> None:
    """A copy is timed on the stream that it runs on: a wrong stream would make one direction seem free."""
    rates = {
        link.ends: link.table[-1].num_bytes / link.table[-1].seconds.value
        for link in measure_links(quick=True)
    }
    ratio = rates["cuda:0", "cuda:1"] / rates["cuda:1", "cuda:0"]
    assert 0.5 < ratio < 2.0
