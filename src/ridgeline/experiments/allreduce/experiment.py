"""`run`: the sweep over sizes, held by the workers of this machine."""

from collections.abc import Sequence

import torch

from ridgeline.experiments.allreduce.sweep import CASES
from ridgeline.experiments.contests import Progress, silent
from ridgeline.experiments.ways.result import WayExperiment
from ridgeline.experiments.ways.together import experiment_together

LOCAL_WORKERS = 2
"""Over gloo, where there are not several GPUs."""


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> WayExperiment:
    """Reduce tensors of several sizes over workers, by each algorithm in turns.

    Args:
        quick: About a minute instead of three.
        only: Sizes, by name; none: all.
        limit_s: Seconds to take, about; None: 60 quick, 180 else.
        device: `cpu` (gloo) or `cuda` (NCCL); None takes GPUs where there are several.
        workers: None: all GPUs, or two processes on the CPU.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no size of a name.
        WorkerError: a worker failed otherwise than in an algorithm.

    Cost: Keeps the machine busy for about `limit_s`.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A single GPU has nobody to exchange with.
    kind = device or ("cuda" if gpus > 1 else "cpu")
    count = workers or (gpus if kind == "cuda" else LOCAL_WORKERS)
    return experiment_together(
        "allreduce",
        "ridgeline.experiments.allreduce.sweep",
        CASES,
        quick=quick,
        only=only,
        limit_s=limit_s,
        device=kind,
        workers=count,
        progress=progress,
    )
