"""Planted type errors: the type check of the project must fail on this file, on every one of them.

A type checker without its configuration passes almost everything and says nothing. That this file
fails shows that the strict configuration is in force and that torch's types are seen.
"""

import torch


def wrong_return() -> int:
    """Returns a string."""
    return "not a number"


def wrong_attribute(x: torch.Tensor) -> torch.Tensor:
    """Calls what a tensor does not have."""
    return x.no_such_method()


def unannotated(x):
    """Leaves its types to be guessed, which only the strict preset refuses."""
    return x
