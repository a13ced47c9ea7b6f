"""`run`: the cases of the experiment, held on this machine."""

from collections.abc import Sequence

from ridgeline.experiments.overlap.batches import device_batches_case, host_batches_case
from ridgeline.experiments.overlap.results import results_case
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import Progress
from ridgeline.experiments.ways.experiment import run_cases
from ridgeline.experiments.ways.result import WayExperiment

CASES = ("results", "batches")


def cases(device: str, quick: bool) -> list[Case]:
    """Results out of the device, and batches into it; on a CPU there is only loading to hide."""
    batches = device_batches_case if device == "cuda" else host_batches_case
    return [results_case(device, quick=quick), batches(quick=quick)]


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> WayExperiment:
    """Compute and copy, one after the other and at the same time; see `run_cases`.

    Raises:
        TaskError: there is no case of a name in `only`.
    """
    return run_cases(
        "overlap", cases, quick=quick, only=only, limit_s=limit_s, device=device, progress=progress
    )
