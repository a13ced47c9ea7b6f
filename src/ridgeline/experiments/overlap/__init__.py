"""The experiment `overlap`: copies that run while the device computes, out of it and into it.

The seeds compute 50 products and copy each to the host: one after the other, and so that one result is
copied while the next is computed. Exercise of the other direction: batches that are loaded and copied in.
"""

from functools import partial

from ridgeline.experiments.overlap.batches import device_batches_case, host_batches_case
from ridgeline.experiments.overlap.results import results_case
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.experiment import run_cases

CASES = ("results", "batches")


def cases(device: str, quick: bool) -> list[Case]:
    """Results out of the device, and batches into it; on a CPU there is only loading to hide."""
    batches = device_batches_case if device == "cuda" else host_batches_case
    return [results_case(device, quick=quick), batches(quick=quick)]


run = partial(run_cases, "overlap", cases)
"""Compute and copy, one after the other and at the same time; see `run_cases`."""
