"""A push and a pull by an actor of Ray, as in its own examples: a process that holds the value in NumPy."""

import importlib
import importlib.util
import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

LACKING = "" if importlib.util.find_spec("ray") else "ray (pip install 'ridgeline[ray]')"
"""What is missing for it here."""


class ActorServer:
    """One actor beside a Ray of its own, which the first use starts and `close` ends.

    Args:
        like: Of the shape of the value, which begins as zeros; float32 on the CPU.

    Cost: Starts half a dozen processes, in seconds. Ray reports nothing to anybody.
    """

    def __init__(self, like: Tensor) -> None:
        # Before Ray is imported, which reads it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._ray: Any = importlib.import_module("ray")
        # A Ray of its own, whatever cluster this host may belong to.
        self._ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        self._value = self._ray.remote(num_cpus=1)(_Value).remote(tuple(like.shape))

    def pushpull(self, tensor: Tensor) -> Tensor:
        """Subtract a tensor from the value; the value, in memory that Ray shares and that is only read."""
        found = self._ray.get(self._value.subtract.remote(tensor.numpy()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(found)

    def close(self) -> None:
        """End the actor and its Ray."""
        self._ray.shutdown()


class _Value:
    """What the actor holds."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._value = numpy.zeros(shape, numpy.float32)

    def subtract(self, tensor: numpy.ndarray) -> numpy.ndarray:
        """Work a tensor in; the value."""
        self._value -= tensor
        return self._value
