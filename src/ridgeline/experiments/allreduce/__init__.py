"""The experiment `allreduce`: every exact algorithm that is offered, beside the backend's own all-reduce."""

from ridgeline.experiments.allreduce.experiment import run as run

__all__ = ("run",)
