"""`run`: the cases of the experiment, held on this machine."""

from collections.abc import Sequence

from ridgeline.experiments.asynchronous.cost import cost_case
from ridgeline.experiments.asynchronous.device_queue import device_queue_case
from ridgeline.experiments.asynchronous.host_queue import host_queue_case
from ridgeline.experiments.asynchronous.memory import memory_case
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.contest import Progress
from ridgeline.experiments.ways.experiment import run_cases
from ridgeline.experiments.ways.result import WayExperiment

CASES = ("queue", "task", "memory")


def cases(device: str, quick: bool) -> list[Case]:
    """Queueing on the device, or on a thread where there is none; what a task costs; what a queue holds."""
    queue = device_queue_case if device == "cuda" else host_queue_case
    return [queue(quick=quick), cost_case(quick=quick), memory_case(quick=quick)]


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    progress: Progress | None = None,
) -> WayExperiment:
    """Queue operations and synchronise once, every mini-batch, or after each; see `run_cases`.

    Raises:
        TaskError: there is no case of a name in `only`.
    """
    return run_cases(
        "async", cases, quick=quick, only=only, limit_s=limit_s, device=device, progress=progress
    )
