"""`run`: pushes and pulls of several sizes, held by the workers of this machine."""

from collections.abc import Sequence

from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress, silent
from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.ways.result import WayExperiment
from ridgeline.experiments.ways.together import experiment_together

WORKERS = 2


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress = silent,
) -> WayExperiment:
    """Push tensors of several sizes to stores and pull the values, beside gloo, in turns.

    Args:
        quick: About a minute instead of three.
        only: Cases, by name; none: all.
        limit_s: Seconds to take, about; None: 60 quick, 180 else.
        device: `cpu` or None.
        workers: None: two processes.
        progress: Takes lines about what happens now.

    Raises:
        TaskError: there is no case of a name, or another device is wanted.
        WorkerError: a worker failed otherwise than in a way.

    Cost: Keeps the machine busy for about `limit_s`.
    """
    if device not in (None, "cpu"):
        raise TaskError(
            f"wanted device 'cpu' for the experiment kvstore, got {device!r}; leave it out"
        )
    return experiment_together(
        "kvstore",
        "ridgeline.experiments.kvstore.exchanges",
        CASES,
        quick=quick,
        only=only,
        limit_s=limit_s,
        device="cpu",
        workers=workers or WORKERS,
        progress=progress,
    )
