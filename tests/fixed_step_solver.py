"""A solver of ordinary differential equations that calls a function of the user's several times."""

from collections.abc import Callable

from torch import Tensor


def odeint(function: Callable[[float, Tensor], Tensor], y: Tensor, num_steps: int = 3) -> Tensor:
    """The end of a trajectory of unit length that begins at `y`, by Heun's method."""
    size = 1.0 / num_steps
    for number in range(num_steps):
        first = function(number * size, y)
        second = function((number + 1) * size, y + size * first)
        y = y + 0.5 * size * (first + second)
    return y
