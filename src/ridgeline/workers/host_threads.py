"""How many threads torch's operators use on the CPU."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"


class MklDynamic(NamedTuple):
    """The switch by which MKL takes fewer threads where there is little to do."""

    get: Callable[[], int]
    set: Callable[[int], None]


def set_threads(count: int) -> None:
    """`torch.set_num_threads`, after which small operators still run on one thread where they did before.

    torch switches off, for the whole process, that MKL takes fewer threads where there is little to do
    (`mkl_set_dynamic`). From then on each `tanh`, `exp`, `log` or `sqrt` of a contiguous tensor, of a hundred
    numbers too, starts all threads and waits for them: with two threads on two idle cores 3 us instead of 1,
    with other programs on these cores up to 10 ms, so that a small step takes 70 times as long.

    Source: aten/src/ATen/ParallelOpenMP.cpp (torch 2.11 to 2.13); timings of `tanh` of 128 numbers.
    """
    mkl = mkl_dynamic()
    before = mkl.get() if mkl is not None else 0
    torch.set_num_threads(count)
    if mkl is not None:
        mkl.set(before)


@lru_cache(maxsize=1)
def mkl_dynamic() -> MklDynamic | None:
    """The switch of the MKL that is part of torch's library; None where there is none (ARM, macOS)."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        return MklDynamic(library.mkl_serv_get_dynamic, library.MKL_Set_Dynamic)
    # `OSError`: the file has another name on this platform; `AttributeError`: torch was built without MKL.
    except (OSError, AttributeError):
        return None
