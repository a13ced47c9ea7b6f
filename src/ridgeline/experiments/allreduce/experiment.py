"""`run`: the sweep over sizes, held by the workers of this machine."""

from collections.abc import Sequence

import torch

from ridgeline.experiments.allreduce.sweep import CASES
from ridgeline.experiments.contests import Progress
from ridgeline.experiments.ways.experiment import LIMITS_S, check_names, experiment_of
from ridgeline.experiments.ways.result import WayExperiment
from ridgeline.experiments.ways.together import Asked, hold_together
from ridgeline.probe.fingerprint import num_cores

LOCAL_WORKERS = 2
"""Over gloo, where there are not several GPUs."""


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
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
    check_names("allreduce", CASES, only)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = device or ("cuda" if gpus > 1 else "cpu")
    count = workers or (gpus if kind == "cuda" else LOCAL_WORKERS)
    limit = LIMITS_S[quick] if limit_s is None else limit_s
    asked = Asked(
        home="ridgeline.experiments.allreduce.sweep",
        device=kind,
        quick=quick,
        only=tuple(only) or CASES,
        limit_s=limit,
    )
    if progress is not None:
        progress(f"allreduce: {count} workers on {kind}, {len(asked.only)} sizes")
    threads = 0 if kind == "cuda" else max(1, num_cores() // count)
    cases = hold_together(asked, workers=count, threads=threads)
    return experiment_of("allreduce", cases, quick=quick, limit_s=limit)
