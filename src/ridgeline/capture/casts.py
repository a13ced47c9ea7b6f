"""Autocast's cache of the weights that it has cast, kept out of what is traced or captured."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def fresh_casts() -> Iterator[None]:
    """No cast is taken from the cache inside, and none that is made inside stays in it.

    A program captured around a cached cast would keep old weights, and a trace leaves casts without data.
    """
    before = torch.is_autocast_cache_enabled()
    # Switching the cache off does not empty it, and a later switch finds what was in it.
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def operator_settings() -> tuple[Any, ...]:
    """What torch's operators look at besides their arguments."""
    return (*casting(), torch.are_deterministic_algorithms_enabled())


def casting() -> tuple[Any, ...]:
    """What autocast computes in on each kind of device; False where it is off."""
    return tuple(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    )
