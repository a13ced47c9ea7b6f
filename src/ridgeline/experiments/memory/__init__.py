"""The experiment `memory`: what an access costs on this machine, from the nearest cache to a packet."""

from ridgeline.experiments.memory.experiment import run as run

__all__ = ("run",)
