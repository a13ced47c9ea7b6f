"""The experiment `hybrid`: every way to execute a program, ours and the others', for inference and training.

The seeds' experiment: 1000 calls of a small perceptron, imperative and as a symbolic program. Here with
larger models, with whole training steps, with the seconds that compiling takes, and with the number of
calls after which they are earned back.
"""

from ridgeline.experiments.hybrid.experiment import run as run

__all__ = ("run",)
