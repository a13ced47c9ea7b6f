"""The experiment `kvstore`: pushing to and pulling from stores, beside collectives and messages of gloo."""

from functools import partial

from ridgeline.errors import TaskError
from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.ways.together import WorkersPlace, run_together

WORKERS = 2


def _place(device: str | None, workers: int | None) -> WorkersPlace:
    if device not in (None, "cpu"):
        raise TaskError(
            f"wanted device 'cpu' for the experiment kvstore, got {device!r}; leave it out"
        )
    return WorkersPlace("cpu", workers or WORKERS)


run = partial(run_together, "kvstore", "ridgeline.experiments.kvstore.exchanges", CASES, _place)
"""Push tensors of several sizes to stores and pull the values, in turns; see `run_together`."""
