"""The experiment `allreduce`: every exact algorithm that is offered, beside the backend's own all-reduce."""

from functools import partial

import torch

from ridgeline.experiments.allreduce.sweep import CASES
from ridgeline.experiments.ways.together import WorkersPlace, run_together

LOCAL_WORKERS = 2
"""Over gloo, where there are not several GPUs."""


def _place(device: str | None, workers: int | None) -> WorkersPlace:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A single GPU has nobody to exchange with.
    kind = device or ("cuda" if gpus > 1 else "cpu")
    return WorkersPlace(kind, workers or (gpus if kind == "cuda" else LOCAL_WORKERS))


run = partial(run_together, "allreduce", "ridgeline.experiments.allreduce.sweep", CASES, _place)
"""Reduce tensors of several sizes over workers, by each algorithm in turns; see `run_together`."""
