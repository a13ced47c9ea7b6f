"""What every contest does alike: which failures are rows of its table, threads, memory, reasons."""

import contextlib
import gc
from collections.abc import Callable, Iterator

import torch

from ridgeline.errors import RidgelineError
from ridgeline.programs import inductor
from ridgeline.workers.host_threads import set_threads

FAILURES = (*inductor.FAILURES, RidgelineError, OSError)
"""What compilers and captures raise over a program that they do not take, by accident or on purpose; a
contender that fails is a row of the table. (Our own mistakes show there too, with their text.)"""
MOST_TURNS = 15
LONGEST_REASON = 300

Progress = Callable[[str], None]


def reason_of(error: Exception) -> str:
    """An error in one line, cut where it becomes long."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]} ..."
    return f"{type(error).__name__}: {text}"


def dismiss(close: Callable[[], object]) -> None:
    """Close a contender; one that failed may fail here once more, and that says nothing new."""
    with contextlib.suppress(*FAILURES):
        close()


def release_memory() -> None:
    """Give back what contenders that are gone have left."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch on the CPU; 0 leaves them."""
    before = torch.get_num_threads()
    if count in (0, before):
        yield
        return
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)
