"""The experiment `networks`: everyday networks of many kinds, `plan="auto"` beside the plain forms.

What a user would write without Ridgeline (eager, `torch.compile`, channels-last, one CUDA graph by hand)
takes turns with `TrainStep(plan="auto")` on the same network; every prediction is set beside its measurement.
"""

from ridgeline.experiments.networks.catalog import catalog as catalog
from ridgeline.experiments.networks.experiment import run as run

__all__ = ("catalog", "run")
