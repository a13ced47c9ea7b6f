"""The experiment `kvstore`: pushing to and pulling from stores, beside collectives and messages of gloo."""

from functools import partial

from ridgeline.experiments.kvstore.exchanges import CASES
from ridgeline.experiments.ways.together import run_together

_HOME = "ridgeline.experiments.kvstore.exchanges"
run = partial(run_together, "kvstore", _HOME, CASES, on_gpus=False)
"""Push tensors of several sizes to stores and pull the values, in turns; see `run_together`."""
