"""Autocast: the region of a step in 16 bits, and its cache, kept out of what is traced or captured."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ridgeline.plan import Precision

AUTOCAST: dict[Precision, torch.dtype] = {"bf16": torch.bfloat16}
"""Precisions in which a step has other operators; `tf32` only runs the same ones faster."""
_NOTHING = contextlib.nullcontext()


def autocast_of(precision: Precision, device: str) -> contextlib.AbstractContextManager[Any]:
    """The region in which a step computes its loss in a precision of a plan, on a kind of device."""
    if precision not in AUTOCAST:
        return _NOTHING
    return _casts_of_its_own(device, AUTOCAST[precision])


@contextlib.contextmanager
def _casts_of_its_own(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Autocast whose cache begins and ends empty, whatever region the caller is in.

    A weight that is used several times is cast once, as in a plain loop. A cast from before would be of old
    weights in every replay, and one that is made in a capture lies in the memory of the graph.
    """
    torch.clear_autocast_cache()
    try:
        with torch.autocast(device, dtype):
            yield
    finally:
        torch.clear_autocast_cache()


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
