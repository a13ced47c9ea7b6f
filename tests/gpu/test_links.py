"""The link matrix on GPUs: every link has a table whose times are those of a real wire."""

import pytest
import torch
from quiet_device import holds_when_quiet

from ridgeline.probe.rates.links import QUICK_SIZES, every_link, measure_links

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.quiet
def test_every_link_is_measured_and_large_copies_are_as_fast_as_wires_are() -> None:
    """All sizes, each link once; 64 MiB go at 0.5 to 2,000 GB/s, and take longer than 4 KiB."""

    def wrong() -> str:
        links = measure_links(quick=True)
        found = [(link.direction, link.source, link.target) for link in links]
        assert found == list(every_link(torch.cuda.device_count()))
        strange = []
        for link in links:
            assert tuple(point.num_bytes for point in link.table) == QUICK_SIZES
            small, large = link.table[0].seconds.value, link.table[-1].seconds.value
            if not (0.5e9 < link.table[-1].num_bytes / large < 2e12 and large > small):
                strange.append(f"{link.ends}: {small}, {large} s")
        return ", ".join(strange)

    holds_when_quiet(wrong)


@pytest.mark.quiet
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_both_directions_between_two_gpus_are_about_as_fast() -> None:
    """A copy is timed on the stream that it runs on: a wrong stream would make one direction seem free."""

    def wrong() -> str:
        rates = {
            link.ends: link.table[-1].num_bytes / link.table[-1].seconds.value
            for link in measure_links(quick=True)
        }
        ratio = rates["cuda:0", "cuda:1"] / rates["cuda:1", "cuda:0"]
        return "" if 0.5 < ratio < 2.0 else str(rates)

    holds_when_quiet(wrong)
