"""Seconds of operators that launch more kernels than a GPU's queue holds, from a CUDA graph of each.

A recurrent layer of cuDNN launches kernels for every time step, on several streams. Issued one by one they
wait for the host, however long the GPU slept before; in a replayed graph they do not, and where the host is
too slow for the device its own time tells.
"""

import contextlib
import statistics
from collections.abc import Collection, Sequence

import torch

from ridgeline.errors import DeviceLostError
from ridgeline.machine import Quantity
from ridgeline.probe.operators.replay import ReplayWatch, WorkloadReplay
from ridgeline.probe.timing import device_seconds
from ridgeline.workload import Op

MANY_LAUNCHES = ("aten._cudnn_rnn.", "aten._cudnn_rnn_backward.")
"""Beginnings of the names of such operators; a CUDA graph can hold each of them."""
REPLAYS = 7
"""Of each graph; the first two warm up."""


def launches_many(op: Op) -> bool:
    """Whether the operator is one of `MANY_LAUNCHES`."""
    return op.name.startswith(MANY_LAUNCHES)


def captured_seconds(
    replay: WorkloadReplay, ops: Sequence[Op], device: torch.device
) -> dict[str, Quantity]:
    """Seconds of every operator that launches many kernels, by key; nothing where there is none.

    The step is issued once more, those operators inside captures that are then replayed. Where one cannot be
    captured after all, nothing is reported, and the earlier timings stand.

    The replay has run before: libraries have prepared what they need.

    Raises:
        RuntimeError: a failed capture left the GPU unusable for this process.

    Cost: Waits for the device.
    """
    wanted = {index for index, op in enumerate(ops) if launches_many(op)}
    if not wanted:
        return {}
    captures = _Captures(ops, wanted, device)
    failures = dict(replay.failures)
    side = torch.cuda.Stream(device)  # the default stream cannot be captured
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side), torch.no_grad():
        try:
            # `settle` ends the capture: what it raises counts as the operator's failure.
            watch = ReplayWatch(before=captures.begin, settle=captures.end)
            replay.run(lambda index: True, lambda: None, watch)
        except DeviceLostError:  # as it looks while a capture is open
            # An open capture would make every later call on the device fail.
            captures.drop()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    has_failed = replay.failures.keys() != failures.keys()
    # What failed only inside a capture can be issued all the same.
    replay.failures.clear()
    replay.failures.update(failures)
    if has_failed:
        return {}
    return {key: Quantity.measured(seconds, "s") for key, seconds in captures.taken.items()}


class _Captures:
    """Captures some operators of a pass, each in its own graph; `taken` has seconds of replays by key."""

    def __init__(self, ops: Sequence[Op], wanted: Collection[int], device: torch.device) -> None:
        self.taken: dict[str, list[float]] = {}
        self._ops = ops
        self._wanted = wanted
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []  # what one of them made is read later on
        self._current = -1

    def begin(self, index: int) -> None:
        """Before an operator is issued."""
        self._current = index
        if index in self._wanted:
            torch.cuda.synchronize(self._device)
            self._graphs.append(torch.cuda.CUDAGraph())
            self._graphs[-1].capture_begin()

    def end(self) -> None:
        """After it was."""
        if self._current in self._wanted:
            self._graphs[-1].capture_end()
            key = self._ops[self._current].key
            self.taken.setdefault(key, []).append(_seconds(self._graphs[-1]))

    def drop(self) -> None:
        """End a capture in which something failed."""
        with contextlib.suppress(RuntimeError):
            self._graphs[-1].capture_end()


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Median seconds of a replay on the GPU."""
    return statistics.median([device_seconds(graph.replay) for _ in range(REPLAYS)][2:])
