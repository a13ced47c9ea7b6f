"""The experiment `async`: a front end that queues work and continues, and a back end that does it.

The seeds' law: with t1 to issue an operation, t2 to compute it and t3 to return its result, N operations
take N (t1 + t2 + t3) one by one and t1 + N t2 + t3 when queued. And its price: a queue that nobody
paces fills the memory.
"""

from functools import partial

from ridgeline.experiments.asynchronous.cost import cost_case
from ridgeline.experiments.asynchronous.device_queue import device_queue_case
from ridgeline.experiments.asynchronous.host_queue import host_queue_case
from ridgeline.experiments.asynchronous.memory import memory_case
from ridgeline.experiments.ways.case import Case
from ridgeline.experiments.ways.experiment import run_cases

CASES = ("queue", "task", "memory")


def cases(device: str, quick: bool) -> list[Case]:
    """Queueing on the device, or on a thread where there is none; what a task costs; what a queue holds."""
    queue = device_queue_case if device == "cuda" else host_queue_case
    return [queue(quick=quick), cost_case(quick=quick), memory_case(quick=quick)]


run = partial(run_cases, "async", cases)
"""Queue operations and synchronise once, every mini-batch, or after each; see `run_cases`."""
