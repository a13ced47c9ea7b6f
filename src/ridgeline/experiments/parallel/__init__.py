"""The experiment `parallel`: work that does not depend on other work, done at the same time.

The seeds' two devices, and the exercises that follow: independent operators inside one device, small
operators, host and device side by side with copies between them, and richer dependencies, forward and
backward: each one after the other, by hand with plain torch, and by `rl.parallelize`.
"""

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
