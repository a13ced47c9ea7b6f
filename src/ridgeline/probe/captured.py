"""Seconds of operators that launch more kernels than a GPU's queue holds, from a CUDA graph of each.

A recurrent layer of cuDNN launches kernels for every time step, on several streams. Issued one by one they
wait for the host, however long the GPU slept before; in a replayed graph they do not, and where the host is
too slow for the device its own time tells.
"""

import statistics
from collections.abc import Sequence

import torch

from ridgeline.machine import Quantity
from ridgeline.probe.replay import Replay, Watch
from ridgeline.workload import Op

MANY_LAUNCHES = ("aten._cudnn_rnn.", "aten._cudnn_rnn_backward.")
"""Beginnings of the names of such operators; a CUDA graph can hold each of them."""
REPLAYS = 7
"""Of each graph; the first two warm up."""


def launches_many(op: Op) -> bool:
    """Whether the operator is one of `MANY_LAUNCHES`."""
    return op.name.startswith(MANY_LAUNCHES)


def captured_seconds(
    replay: Replay, ops: Sequence[Op], device: torch.device
) -> dict[str, Quantity]:
    """Seconds of every operator that launches many kernels, by key; nothing where there is none.

    The step is issued once more, those operators inside captures that are then replayed.

    Args:
        replay: Of the step, which has run before: libraries have prepared what they need.
        ops: Of the step, in order.
        device: A GPU.

    Cost: Waits for the device.
    """
    wanted = {index for index, op in enumerate(ops) if launches_many(op)}
    taken: dict[str, list[float]] = {}
    graphs: list[torch.cuda.CUDAGraph] = []  # what one of them made is read until the pass ends
    current: list[int] = []

    def before(index: int) -> None:
        current[:] = [index]
        if index in wanted:
            torch.cuda.synchronize(device)
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin()

    def settle() -> None:
        if current[0] in wanted:
            graphs[-1].capture_end()
            taken.setdefault(ops[current[0]].key, []).append(_seconds(graphs[-1]))

    side = torch.cuda.Stream(device)  # the default stream cannot be captured
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), torch.no_grad():
        if wanted:
            replay.run(lambda index: True, lambda: None, Watch(before=before, settle=settle))
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    return {key: Quantity.measured(seconds, "s") for key, seconds in taken.items()}


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a replay on the GPU."""
    found = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(found[2:])
