"""Operators that end, stop or exhaust the process that issues them, and a survey that knows them."""

import os
import threading

import torch

from ridgeline.probe import survey as real


def abort(x: torch.Tensor) -> torch.Tensor:
    """Ends the process, as an assertion in a library does."""
    os.abort()


def leave(x: torch.Tensor) -> torch.Tensor:
    """Ends the process without a signal."""
    os._exit(7)


def hang(x: torch.Tensor) -> torch.Tensor:
    """Never comes back."""
    threading.Event().wait()


def exhaust(x: torch.Tensor) -> torch.Tensor:
    """Wants more memory than there is."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 TiB\nmore words")


# Not `custom_op`: its first call imports the compiler, which takes seconds.
_LIBRARY = torch.library.Library("probe_faults", "DEF")
for _function in (abort, leave, hang, exhaust):
    _LIBRARY.define(f"{_function.__name__}(Tensor x) -> Tensor")
    _LIBRARY.impl(_function.__name__, _function, "CPU")


def survey(request: bytes) -> bytes:
    """The survey, in a process that knows the operators above."""
    return real.survey(request)


def survey_lost(request: bytes) -> bytes:
    """Fails before any operator is issued."""
    raise ValueError("no survey today")
