"""The experiment `parallel`: work that does not depend on other work, done at the same time.

The seeds' two devices, and the exercises that follow: independent operators inside one device, small
operators, host and device side by side with copies between them, and richer dependencies, forward and
backward: each one after the other, by hand with plain torch, and by `rl.parallelize`.
"""

from ridgeline.experiments.parallel.experiment import run as run

__all__ = ("run",)
