"""Capturing CUDA graphs, and giving them up."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ridgeline.capture.casts import is_in_cached_weights
from ridgeline.capture.deadline import undisturbed
from ridgeline.capture.interception import intercepted
from ridgeline.errors import CaptureError, RidgelineError

ANOMALIES = (
    "steps under anomaly detection, which looks at gradients on the host, ran without a graph"
)
SAVED_ON_THE_WAY = (
    "steps under torch.autograd.graph.saved_tensors_hooks, which run in Python, ran without a graph"
)
SAVED_AS_WRITTEN = (
    "steps under torch.autograd.graph.saved_tensors_hooks ran as they were written, since compiled ones save "
    "other tensors"
)
WEIGHTS_CACHED = (
    "steps inside of torch.nn.utils.parametrize.cached() ran as they were written, since the cache is of one "
    "step; use it inside of the loss function instead"
)
WATCHING = (torch.is_anomaly_enabled, torch.is_anomaly_check_nan_enabled)
"""What together says that gradients are looked at."""
SAVED_TENSORS_HOOKS = torch._C._autograd._top_saved_tensors_default_hooks  # noqa: SLF001 - no public name
"""Gives the innermost hooks on what autograd saves for the backward pass, or None."""


def watched() -> str:
    """What runs in Python inside of a step, and no graph or program can hold; empty if nothing does.

    Anomaly detection, which waits for each gradient to raise where one is no number; hooks on saved tensors;
    a cache of computed weights; what `interception` lists.
    """
    if why := intercepted():
        return f"steps {why}"
    if is_in_cached_weights():
        return WEIGHTS_CACHED
    if all(is_on() for is_on in WATCHING):
        return ANOMALIES
    return SAVED_ON_THE_WAY if watches_saved_tensors() else ""


def watched_if_compiled() -> str:
    """What runs in Python inside of a step, and would see or do something else in a compiled one."""
    if why := intercepted():
        return f"steps {why}"
    if is_in_cached_weights():
        return WEIGHTS_CACHED
    return SAVED_AS_WRITTEN if watches_saved_tensors() else ""


def watches_saved_tensors() -> bool:
    """Whether there are hooks on what autograd saves for the backward pass."""
    return SAVED_TENSORS_HOOKS(True) is not None


@contextlib.contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    what: str,
    *,
    stream: torch.cuda.Stream,
    pool: Any = None,
    instead: str = "execution='eager'",
) -> Iterator[None]:
    """Capture what runs inside, none of which is executed.

    Threads that pin memory or watch NCCL continue calling CUDA meanwhile. A failed capture is cleared away,
    so that the process continues where the device still works.

    Args:
        graph: Receives it.
        what: What is captured, for the message.
        stream: Captured on it.
        pool: Memory shared with other captures; None for its own.
        instead: How to do without a graph, for the message.

    Raises:
        CaptureError: it cannot be captured.

    Cost: Waits for the device, and gives cached memory back to it.
    """
    pool = torch.cuda.graph_pool_handle() if pool is None else pool  # known, should this fail
    before = torch.cuda.current_stream()
    try:
        with (
            undisturbed(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    except BaseException as error:
        torch.cuda.set_stream(before)  # torch leaves its own current where it cannot end a capture
        lost = clear_failed_capture(graph, pool, stream.device)
        # What the user's code raises is its own; torch reports failed captures as RuntimeError.
        if isinstance(error, RidgelineError) or not isinstance(error, RuntimeError):
            raise
        way_out = f"use {instead}"
        if lost:
            way_out = (
                f"the device does not work since ({lost}), start the process again with {instead}"
            )
        raise CaptureError(
            f"wanted to capture {what} as a CUDA graph, got {type(error).__name__}: {error}; {way_out}"
        ) from error


def clear_failed_capture(graph: torch.cuda.CUDAGraph, pool: Any, device: torch.device) -> str:
    """Put right what torch leaves behind where a capture fails: why that cannot be; empty if it is done.

    Where a capture cannot be ended the allocator continues to take memory from its pool, which is never given
    back, and the random generator refuses to draw ("Offset increment outside graph capture encountered
    unexpectedly") until a capture ends well: one of nothing does.

    Cost: Waits for the device.
    """
    try:
        torch.cuda.synchronize(device)
        if _has_ended(graph):
            graph.reset()
        else:
            torch._C._cuda_endAllocateToPool(device.index, pool)  # noqa: SLF001 - there is no
            torch._C._cuda_releasePool(device.index, pool)  # noqa: SLF001 - public name
        # A capture of nothing, of which torch warns.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*[Gg]raph is empty.*")
            with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream(device)):
                pass
        # Draws once, to see that the generator works; the user's random numbers stay as they were.
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.empty(1, device=device).uniform_()
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def _has_ended(graph: torch.cuda.CUDAGraph) -> bool:
    """Whether its capture was ended; torch knows the graph's pool from then on."""
    try:
        graph.pool()
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream, device: torch.device | None = None) -> Iterator[None]:
    """What runs inside is on a stream, after what the current one was given, and before what it gets then.

    Also where it raises: tensors are put back after a failure only after what wrote them.
    """
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


@contextlib.contextmanager
def told_of_capture(answer: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Programs inside that ask torch whether they are captured get this answer, whether or not they are.

    Libraries do ask, to leave out what a graph cannot hold: those of transformers look at the values of a
    mask only outside of a capture.
    """
    asked = torch.cuda.is_current_stream_capturing
    # Libraries ask by this name, so that replacing it reaches all that do not hold the function itself.
    torch.cuda.is_current_stream_capturing = answer
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def release(graphs: list[torch.cuda.CUDAGraph]) -> None:
    """Give graphs up while CUDA still works: at the latest before the interpreter is torn down."""
    for graph in graphs:
        graph.reset()
    graphs.clear()


def lost_device() -> RuntimeError | None:
    """What the GPU answers where it works for this process no more; None where it does.

    Cost: Waits for the device.
    """
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return error
    return None
