"""A clock for work on a GPU: replays of CUDA graphs, so that the host's speed does not count."""

import functools
import warnings
from collections.abc import Callable

import torch

BRANCHES = (4, 16)
"""Numbers of rows side by side, to see how much of the device one row leaves to others. A few rows show less
than many, for each has a beginning and an end."""
LEAST_FILL = 0.05
REPLAYS = 5
TRIES = 3
_HOLD_CYCLES = 2_000_000
"""About a millisecond, in which the host queues what is timed; more calls than that hide it themselves."""
_HOPS = 40
"""Kernels on each of two streams that wait for one another all the time."""


def fill_of(row_s: float, side_by_side_s: float, branches: int) -> float:
    """Share of the device that an operation fills, from a row of it alone and several rows side by side.

    Rows that do not notice each other take as long as one; rows that fill the device take turns.
    """
    # An operator that launches nothing (an allocation) leaves an empty graph.
    if row_s <= 0.0:
        return 1.0
    return min(1.0, max(LEAST_FILL, side_by_side_s / (branches * row_s)))


class GraphClock:
    """Times what is enqueued on one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._branches = [torch.cuda.Stream(device) for _ in range(max(BRANCHES))]
        self._pool = torch.cuda.graph_pool_handle()
        # A pool is gone with the last graph that uses it; this one stays.
        self._number = torch.zeros(1, device=device)
        self._keeper = torch.cuda.CUDAGraph()
        self._record(self._keeper, lambda: self._number.add_(1.0))

    def queued_s(self, call: Callable[[], object], count: int) -> float:
        """Device seconds of a call among `count` calls queued behind one another: the least of three tries.

        Cost: Waits for the device.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            return self._between_events(call, count) / count

    def row_s(self, call: Callable[[], object], count: int) -> float:
        """Seconds of a graph that holds `count` calls in a row.

        Raises:
            RuntimeError: the call cannot be captured; the process cannot continue.
        """
        return self._replay_s(lambda: _repeat(call, count))

    def side_by_side_s(self, calls: list[Callable[[], object]], count: int) -> float:
        """Seconds of a graph with a row of `count` calls for each of the calls, side by side; see `row_s`."""
        self._fork_and_join(calls, 1)  # libraries make a workspace for each new stream
        return self._replay_s(lambda: self._fork_and_join(calls, count))

    def sync_s(self) -> float:
        """Seconds that a kernel loses by waiting for one on another lane of the same graph.

        Two rows of the smallest kernel there is, where each kernel waits for its neighbour in the
        other row, against two rows that do not wait.
        """
        numbers = [torch.zeros(1, device=self._device) for _ in range(2)]
        free_s = self._replay_s(lambda: self._two_rows(numbers, are_tied=False))
        tied_s = self._replay_s(lambda: self._two_rows(numbers, are_tied=True))
        return max(0.0, tied_s - free_s) / _HOPS

    def _two_rows(self, numbers: list[torch.Tensor], *, are_tied: bool) -> None:
        rows = self._branches[:2]
        for row in rows:
            row.wait_stream(self._stream)
        for _ in range(_HOPS):
            for row, number in zip(rows, numbers, strict=True):
                with torch.cuda.stream(row):
                    number.add_(1.0)
            if are_tied:
                marks = [row.record_event() for row in rows]
                for row, mark in zip(rows, reversed(marks), strict=True):
                    row.wait_event(mark)
        for row in rows:
            self._stream.wait_stream(row)

    def _fork_and_join(self, calls: list[Callable[[], object]], count: int) -> None:
        current = torch.cuda.current_stream(self._device)
        branches = self._branches[: len(calls)]
        for branch in branches:
            branch.wait_stream(current)
        for branch, call in zip(branches, calls, strict=True):
            with torch.cuda.stream(branch):
                _repeat(call, count)
        for branch in branches:
            current.wait_stream(branch)

    def _replay_s(self, work: Callable[[], object]) -> float:
        """Seconds of a replay of what `work` enqueues."""
        graph = torch.cuda.CUDAGraph()
        self._record(graph, work)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            # The first replay uploads the graph, which takes longer than those after it.
            graph.replay()
            seconds = self._between_events(graph.replay, REPLAYS) / REPLAYS
        torch.cuda.synchronize(self._device)
        graph.reset()
        return seconds

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], object]) -> None:
        torch.cuda.synchronize(self._device)
        with (
            torch.cuda.device(self._device),
            torch.cuda.stream(self._stream),
            warnings.catch_warnings(),
        ):
            # Operators that only allocate make a graph without nodes, of which torch warns.
            warnings.filterwarnings("ignore", message=".*[Gg]raph is empty.*")
            # Other threads (a loader, a communicator's watchdog) may call CUDA meanwhile without failing the
            # capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()

    def _between_events(self, call: Callable[[], object], count: int) -> float:
        tries: list[float] = []
        for _ in range(TRIES):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(_HOLD_CYCLES)  # noqa: SLF001 - the only way to hold a stream up
            begin.record()
            _repeat(call, count)
            end.record()
            end.synchronize()
            tries.append(begin.elapsed_time(end) * 1e-3)
        return min(tries)


@functools.cache
def stream_sync_s(device: torch.device) -> float:
    """Seconds that a wait for another stream costs in a graph on this GPU; see `GraphClock.sync_s`.

    Cost: Two small captures, once per process and device.
    """
    return GraphClock(device).sync_s()


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()
