"""`run`: the cases of the experiment, held on this machine."""

from collections.abc import Sequence

from ridgeline.experiments.parallel.gpus import gpu_cases
from ridgeline.experiments.parallel.threads import thread_cases
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import Progress
from ridgeline.experiments.ways.experiment import run_cases
from ridgeline.experiments.ways.result import WayExperiment

CASES = ("devices", "operators", "small", "host-and-device", "branches", "perceptron")


def cases(device: str, quick: bool) -> list[Case]:
    """The seeds' two devices, then their exercises 1, 2, 3 and 5."""
    return gpu_cases(quick=quick) if device == "cuda" else thread_cases(quick=quick)


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> WayExperiment:
    """Do independent work one after the other, by hand in parallel, and by ours; see `run_cases`.

    Raises:
        TaskError: there is no case of a name in `only`.
    """
    return run_cases(
        "parallel", cases, quick=quick, only=only, limit_s=limit_s, device=device, progress=progress
    )
