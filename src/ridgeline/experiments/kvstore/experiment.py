"""`run`: pushes and pulls of several sizes, held by the workers of this machine."""

from collections.abc import Sequence

from ridgeline.errors import TaskError
from ridgeline.experiments.contests import Progress
from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.ways.experiment import LIMITS_S, check_names, experiment_of
from ridgeline.experiments.ways.result import WayExperiment
from ridgeline.experiments.ways.together import Asked, hold_together
from ridgeline.probe.fingerprint import num_cores

WORKERS = 2


def run(
    *,
    quick: bool = False,
    only: Sequence[str] = (),
    limit_s: float | None = None,
    device: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
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
    check_names("kvstore", CASES, only)
    if device not in (None, "cpu"):
        raise TaskError(
            f"wanted device 'cpu' for the experiment kvstore, got {device!r}; leave it out"
        )
    count = workers or WORKERS
    limit = LIMITS_S[quick] if limit_s is None else limit_s
    asked = Asked(
        home="ridgeline.experiments.kvstore.exchanges",
        device="cpu",
        quick=quick,
        only=tuple(only) or CASES,
        limit_s=limit,
    )
    if progress is not None:
        progress(f"kvstore: {count} workers, {len(asked.only)} cases")
    cases = hold_together(asked, workers=count, threads=max(1, num_cores() // count))
    return experiment_of("kvstore", cases, quick=quick, limit_s=limit)
