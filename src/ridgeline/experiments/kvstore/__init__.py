"""The experiment `kvstore`: pushing to and pulling from stores, beside collectives and messages of gloo."""

from ridgeline.experiments.kvstore.experiment import run as run

__all__ = ("run",)
