"""Caches of weights, kept out of what is traced or captured: autocast's casts, and parametrizations.

With the region of a step in 16 bits, to which the former belong.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.utils import parametrize

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


def is_in_cached_weights() -> bool:
    """Whether the caller is inside of `torch.nn.utils.parametrize.cached()`, in which one step can run."""
    return bool(parametrize._cache_enabled)  # noqa: SLF001 - has no public name


@contextlib.contextmanager
def outside_cached_weights() -> Iterator[None]:
    """As if the caller were not inside of `torch.nn.utils.parametrize.cached()`; its cache is kept.

    A step that runs twice would go backward through the graph of the cached weights twice.
    """
    before = parametrize._cache_enabled, parametrize._cache  # noqa: SLF001
    parametrize._cache_enabled, parametrize._cache = 0, dict[tuple[int, str], Any]()  # noqa: SLF001
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before  # noqa: SLF001


def operator_settings() -> tuple[Any, ...]:
    """What torch's operators look at besides their arguments."""
    return (*casting(), torch.are_deterministic_algorithms_enabled())


def casting() -> tuple[Any, ...]:
    """What autocast computes in on each kind of device; False where it is off."""
    return tuple(
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        for kind in ("cpu", "cuda")
    )
