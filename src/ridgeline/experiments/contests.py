"""What every contest does alike: which failures are rows of its table, threads, memory, reasons."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ridgeline.codec import VERSION
from ridgeline.errors import RidgelineError
from ridgeline.probe.host.fingerprint import driver
from ridgeline.probe.timing import synchronize
from ridgeline.programs import inductor
from ridgeline.recording.turns import call_s
from ridgeline.workers.host_threads import set_threads

FAILURES = (*inductor.FAILURES, RidgelineError, OSError)
"""What compilers and captures raise over a program that they do not take, by accident or on purpose; a
contender that fails is a row of the table. (Our own mistakes show there too, with their text.)"""
MOST_TURNS = 15
LONGEST_REASON = 300
WARMUP_CALLS = 3
"""On a side stream before a capture: libraries allocate and tune, an optimizer makes its state."""

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Where nobody wants to know what happens now."""


def nothing() -> None:
    """Closes what holds nothing, and is a task without work."""


def as_written(model: nn.Module) -> nn.Module:
    """A model that nothing wraps, compiles or scripts."""
    return model


def scripted(program: Callable[..., Any]) -> Any:
    """A module or function as TorchScript; torch announces its end, and it is still a peer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(program)


def versions() -> dict[str, str]:
    """What figures depend on: of Ridgeline, torch, CUDA and the driver."""
    found = {"ridgeline": VERSION, "torch": str(torch.__version__)}
    if torch.cuda.is_available():
        found |= {"cuda": str(torch.version.cuda), "driver": driver()}
    return found


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
    # Models and their hooks refer to each other in circles, which hold memory until they are collected.
    gc.collect()
    # No context is made for this where there is none so far.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def wall_s(run: Callable[[], Any], calls: int = 1) -> float:
    """Mean seconds of a call by the host's clock, all devices idle before and after.

    Cost: Synchronises every device in use.
    """
    return call_s(run, calls, synchronize)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads for torch on the CPU; 0 leaves them."""
    before = torch.get_num_threads()
    if count in (0, before):
        # Nothing is set, and nothing to put back.
        yield
        return
    set_threads(count)
    try:
        yield
    finally:
        set_threads(before)


def warm_up_aside(fn: Callable[[], Any]) -> None:
    """Some calls on a side stream, as they must precede a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            fn()
    torch.cuda.current_stream().wait_stream(side)


def captured(fn: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The kernels of `fn` in one CUDA graph, as a script captures them; replays overwrite the results.

    Source: the section "CUDA graphs" of torch's notes on CUDA semantics.
    """
    warm_up_aside(fn)
    graph = torch.cuda.CUDAGraph()
    # Other threads may allocate meanwhile, which the default mode takes for an error.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = fn()
    return graph, results
