"""The experiment `allreduce`: every exact algorithm that is offered, beside the backend's own all-reduce."""

from functools import partial

from ridgeline.experiments.allreduce.sweep import CASES
from ridgeline.experiments.ways.together import run_together

run = partial(run_together, "allreduce", "ridgeline.experiments.allreduce.sweep", CASES)
"""Reduce tensors of several sizes over workers, by each algorithm in turns; see `run_together`."""
