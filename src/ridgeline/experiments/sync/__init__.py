"""The experiment `sync`: training steps over links of several rates, ours beside DistributedDataParallel."""

from ridgeline.experiments.sync.experiment import run as run

__all__ = ("run",)
