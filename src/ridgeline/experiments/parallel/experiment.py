"""`run`: the cases of the experiment, held on this machine."""

from functools import partial

from ridgeline.experiments.parallel.gpus import gpu_cases
from ridgeline.experiments.parallel.threads import thread_cases
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.experiment import run_cases

CASES = ("devices", "operators", "small", "host-and-device", "branches", "cell", "perceptron")


def cases(device: str, quick: bool) -> list[Case]:
    """The seeds' two devices, then their exercises 1, 2, 3 and 5."""
    return gpu_cases(quick=quick) if device == "cuda" else thread_cases(quick=quick)


run = partial(run_cases, "parallel", cases)
"""Do independent work one after the other, by hand in parallel, and by ours; see `run_cases`."""
