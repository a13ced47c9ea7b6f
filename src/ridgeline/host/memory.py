"""Memory of the host that a training step frees and soon wants again."""

import ctypes
import os
from collections.abc import Mapping
from functools import lru_cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt. Source: malloc.h of the GNU C library."""
_LARGEST_FROM_HEAP = (1 << 30, 32 << 20)
"""Blocks up to 1 GiB are to come from the heap, or up to 32 MiB, the most that older C libraries admit."""
_GIVEN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, instead of handing it back to the system.

    A step frees its activations and allocates the same ones a moment later. By default the GNU C library
    gives blocks of megabytes back at once, and each new one then costs a page fault every 4 KiB: on two
    cores 10 to 20 % of a step of ResNet-50, DenseNet-121 or ViT-B/16, and it varies from step to step. The
    peak of memory stays the same; between peaks the process keeps what it had.

    Returns:
        Whether freed memory is kept: not with another C library or allocator, nor where a variable of
        the environment (`MALLOC_TRIM_THRESHOLD_` and its like, `GLIBC_TUNABLES`) says how to allocate.
    """
    return _keep() if not is_given(os.environ) else False


def is_given(environment: Mapping[str, str]) -> bool:
    """Whether the environment says how the C library is to allocate."""
    has_tunable = "glibc.malloc" in environment.get("GLIBC_TUNABLES", "")
    return has_tunable or any(name in environment for name in _GIVEN)


@lru_cache(maxsize=1)
def _keep() -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    # Setting one threshold also ends the library's own adapting of both.
    has_heap = any(mallopt(_MMAP_THRESHOLD, size) for size in _LARGEST_FROM_HEAP)
    return has_heap and bool(mallopt(_TRIM_THRESHOLD, -1))
