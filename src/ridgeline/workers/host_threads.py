"""How many threads torch's operators use on the CPU."""

import ctypes
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, NamedTuple

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


class ThreadsKept:
    """The number of threads as it is when this is made, given back by `close`.

    Several may be open at a time, and close in any order. A number that other code has set meanwhile stays.

    Args:
        count: What is set afterwards; 0: nothing.

    Attributes:
        before: The number to give back.
    """

    _open: ClassVar[list["ThreadsKept"]] = []

    def __init__(self, count: int) -> None:
        self._count = count
        self.before = torch.get_num_threads()
        if count:
            self._open.append(self)

    def close(self) -> None:
        """Safe to call twice."""
        if self not in self._open:
            return
        place = self._open.index(self)
        self._open.remove(self)
        if place < len(self._open):  # what was there before is for that one to give back
            later = self._open[place]
            if later.before == self._count:
                later.before = self.before
        elif torch.get_num_threads() == self._count:
            set_threads(self.before)


@lru_cache(maxsize=1)
def mkl_dynamic() -> MklDynamic | None:
    """The switch of the MKL that is part of torch's library; None where there is none (ARM, macOS)."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        return MklDynamic(library.mkl_serv_get_dynamic, library.MKL_Set_Dynamic)
    # `OSError`: the file has another name on this platform; `AttributeError`: torch was built without MKL.
    except (OSError, AttributeError):
        return None
