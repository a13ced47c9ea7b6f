"""Lanes that are CUDA streams: dependencies between their tasks become events, and the host never waits.

A task of such a lane is over, for the engine, once its function has enqueued its kernels. What the
stream still has to do is recorded by events in the variables: every write leaves one, and so does every
read since the last write. The next user waits on the device, and only for other streams: a stream
runs its own work in order.

Source: the event mode of MXNet's threaded engine (Apache MXNet pull request 20331).
"""

import functools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ridgeline.engine.lanes.lanes import InOrderLane, call
from ridgeline.engine.task import EngineTask, Finish, Variable
from ridgeline.errors import EngineError


def events_to_wait_for(
    reads: Sequence[Variable], writes: Sequence[Variable], stream: Hashable
) -> list[Any]:
    """The events that `stream` must wait for before it touches these variables.

    A reader waits for the last write, a writer also for all reads since; the stream's own work needs
    no wait, and of any other stream only the newest event counts.
    """
    newest: dict[Hashable, tuple[Any, int]] = {}

    def need(other: Hashable, event: Any, sequence: int) -> None:
        if other != stream and (other not in newest or newest[other][1] < sequence):
            newest[other] = (event, sequence)

    for variable in (*reads, *writes):
        if variable.writer_event is not None:
            need(*variable.writer_event)
    for variable in writes:
        for other, (event, sequence) in variable.reader_events.items():
            need(other, event, sequence)
    return [event for event, _ in newest.values()]


def leave_event(
    reads: Sequence[Variable],
    writes: Sequence[Variable],
    stream: Hashable,
    event: Any,
    sequence: int,
) -> None:
    """Note that `event` is the end of a task on `stream` that touched these variables."""
    for variable in reads:
        variable.reader_events[stream] = (event, sequence)
    for variable in writes:
        variable.reader_events.clear()  # the write waited for them: who waits for it, waits for them
        variable.writer_event = (stream, event, sequence)


class StreamEvent:
    """The end of a task on a stream.

    Args:
        event: Of torch.
        is_open: Whether the capture that it belongs to still continues; None outside of any.
    """

    __slots__ = ("_event", "_is_open")

    def __init__(self, event: Any, is_open: Callable[[], bool] | None) -> None:
        self._event = event
        self._is_open = is_open

    def wait(self) -> None:
        """Make the current stream wait for it, on the device."""
        # Inside a capture only events of that capture exist; what came before it has to be over, or ordered,
        # before the graph is launched. Outside, the events of a capture never happen.
        if torch.cuda.is_current_stream_capturing():
            can_wait = self._is_open is not None and self._is_open()
        else:
            can_wait = self._is_open is None
        if can_wait:
            self._event.wait()

    def synchronize(self) -> None:
        """Make the host wait for it; an EngineError if it belongs to a capture, in which nothing runs."""
        if self._is_open is not None:
            raise EngineError(
                "wanted the result of a task on the host, got one that was captured into a CUDA graph, "
                "where nothing runs yet; keep tasks of the CPU lanes out of the capture"
            )
        self._event.synchronize()


class StreamLane(InOrderLane):
    """Tasks enqueue on one CUDA stream, in push order.

    A task sees what was enqueued before its push on the stream that was current there. Under a
    capture the lane's stream joins it with its first task; `Engine.wait_all` brings it back, which
    every capture needs before it ends.

    Without a stream, tasks run on the one that is current at the push. `device`: whose current stream counts
    there; None: that of `stream`, or the current one.
    """

    def __init__(
        self,
        finish: Finish,
        stream: torch.cuda.Stream | None = None,
        *,
        device: torch.device | int | None = None,
    ) -> None:
        super().__init__(finish)
        self.stream = stream
        self._device = stream.device if device is None and stream is not None else device
        self._pushes: deque[tuple[EngineTask, torch.cuda.Stream, Any]] = deque()
        self._fork: object = None
        """That by which the stream joined the present capture, if there is one."""
        self._last: dict[Hashable, StreamEvent] = {}

    def enqueue(self, task: EngineTask) -> None:
        """Note the stream that is current at the push, and how far it is."""
        super().enqueue(task)
        current = torch.cuda.current_stream(self._device)
        needs_event = self.stream is not None and current != self.stream
        # A stream runs its own work in order, so an event is needed between two streams alone.
        event = current.record_event() if needs_event else None
        self._pushes.append((task, self.stream or current, event))

    def launch(self, task: EngineTask) -> None:
        """Enqueue the task's work on the stream, behind what it has to wait for."""
        noted, stream, pushed = self._pushes.popleft()
        while noted is not task:  # those of tasks that were skipped, or whose push was interrupted
            noted, stream, pushed = self._pushes.popleft()
        try:
            error = self._run(task, stream, pushed)
        except BaseException as raised:  # noqa: BLE001 - errors of the waits belong to the waiters, too
            error = raised
        self._finish(task, error)

    def join(self) -> None:
        """Make the current stream wait, on the device, for all that was launched here."""
        own = _key(torch.cuda.current_stream(self._device))
        for key, event in self._last.items():
            if key != own:
                event.wait()
        if torch.cuda.is_current_stream_capturing():
            # What is joined is behind every later push: no event of this capture is needed any more.
            self._last.clear()
            self._fork = None

    def _run(
        self, task: EngineTask, stream: torch.cuda.Stream, pushed: Any
    ) -> BaseException | None:
        key = _key(stream)
        with torch.cuda.stream(stream):
            was_capturing = torch.cuda.is_current_stream_capturing()
            if pushed is not None:
                # This is what brings the stream into a capture, where the pushing stream is in one.
                stream.wait_event(pushed)
            if not torch.cuda.is_current_stream_capturing():
                self._fork = None
            elif not was_capturing or self._fork is None:
                self._fork = object()
            for event in events_to_wait_for(task.reads, task.writes, key):
                event.wait()
            error = call(task)
            fork = self._fork
            is_open = None if fork is None else functools.partial(self._is_capturing_as, fork)
            done = StreamEvent(stream.record_event(), is_open)
        self._last[key] = done
        leave_event(task.reads, task.writes, key, done, task.sequence)
        return error

    def _is_capturing_as(self, fork: object) -> bool:
        """Whether the lane's stream is in a capture, and joined it with `fork`."""
        if self._fork is not fork:
            return False
        if self.stream is None:
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(self.stream):
            return torch.cuda.is_current_stream_capturing()


def _key(stream: torch.cuda.Stream) -> Hashable:
    return stream.device_index, stream.cuda_stream


def device_lanes(device: torch.device | str | int) -> dict[str, Callable[[Finish], StreamLane]]:
    """The lanes of one GPU, for `Engine(lanes=...)`, named `kind:index` with the GPU's index.

    `compute` is the caller's current stream; `copy-in`, `copy-out` and `communication` have one
    stream each, the last one of high priority.

    Raises:
        EngineError: it is no CUDA device, or names no index.
    """
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type != "cuda" or place.index is None:
        raise EngineError(
            f"wanted a CUDA device with its index, such as cuda:0, got {place} in device_lanes(...); "
            "CPU lanes need no factory"
        )

    def with_stream(priority: int, finish: Finish) -> StreamLane:
        return StreamLane(finish, torch.cuda.Stream(place, priority=priority))

    return {
        f"compute:{place.index}": functools.partial(StreamLane, device=place),
        f"copy-in:{place.index}": functools.partial(with_stream, 0),
        f"copy-out:{place.index}": functools.partial(with_stream, 0),
        f"communication:{place.index}": functools.partial(with_stream, -1),
    }
