"""Capturing CUDA graphs, and giving them up."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ridgeline.errors import CaptureError, RidgelineError
from ridgeline.runtime.deadline import undisturbed

ANOMALIES = (
    "steps under anomaly detection, which looks at gradients on the host, ran without a graph"
)


def finds_anomalies() -> bool:
    """Whether torch waits for each gradient, to raise where one is no number: no graph can hold that."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


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

    Threads that pin memory or watch NCCL go on calling CUDA meanwhile.

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
    try:
        with (
            undisturbed(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            yield
    except RuntimeError as error:
        if isinstance(error, RidgelineError):
            raise
        raise CaptureError(
            f"wanted to capture {what} as a CUDA graph, got {type(error).__name__}: {error}; the process "
            f"cannot go on after a failed capture, start it again with {instead}"
        ) from error


@contextlib.contextmanager
def on_stream(stream: torch.cuda.Stream, device: torch.device | None = None) -> Iterator[None]:
    """What runs inside is on a stream, after what the current one was given, and before what it gets then.

    Also where it raises: whoever puts tensors back after a failure does so after what wrote them.
    """
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)


def release(graphs: list[torch.cuda.CUDAGraph]) -> None:
    """Give graphs up while CUDA still works: at the latest before the interpreter is torn down."""
    for graph in graphs:
        graph.reset()
    graphs.clear()
