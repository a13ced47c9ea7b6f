"""What a saved program cannot follow, since there is no code of its function to run instead."""

from collections.abc import Iterable
from typing import Any

from ridgeline.capture.interception import innermost_transform, is_special, level_of_tangents
from ridgeline.errors import BatchError


def check_alone(leaves: Iterable[Any]) -> None:
    """Refuse inputs of which a saved program would pass by what is more than numbers.

    Raises:
        BatchError: one is of a subclass of `Tensor`, or this is inside of forward-mode differentiation or a
            transform of `torch.func`.

    Cost: 0.1 us a leaf.
    """
    if innermost_transform() is not None or level_of_tangents() >= 0:
        raise BatchError(
            "wanted a call of a saved program by itself, which hands no tangents along and cannot be "
            "transformed, got one inside of forward-mode differentiation or a transform of torch.func; call "
            "it outside, or the function that it was made from"
        )
    for index, leaf in enumerate(leaves):
        if is_special(leaf):
            raise BatchError(
                f"wanted inputs that are plain tensors, got leaf {index}, a {type(leaf).__name__}, whose own "
                "functions a saved program does not call; give it as .as_subclass(torch.Tensor)"
            )
