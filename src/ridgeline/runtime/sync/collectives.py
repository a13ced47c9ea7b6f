"""Collectives as tasks of the communication lane, each a frame of the step; and those of any type."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from ridgeline.engine import Engine, EngineTask, Variable
from ridgeline.recording.clocks import DeviceClock
from ridgeline.recording.recorder import Recorder
from ridgeline.workers import flat_collectives
from ridgeline.workers.attendance import Attendance


@contextmanager
def exchange_frame(recorder: Recorder, name: str) -> Iterator[None]:
    """The frame of what is exchanged inside by the step itself; a step that is not sampled has none."""
    record = recorder.current
    start = recorder.clock.stamp() if record.is_sampled else None
    yield
    if start is not None:
        record.closed.append((name, "communication", start, recorder.clock.stamp()))


class Collectives:
    """Pushes collectives of one worker; on the CPU their tasks end when the transfer does.

    Args:
        engine: Its `communication` lane runs them.
        group: Of the workers that take part.
        on_device: NCCL on a stream, or gloo.
        blocks: Whether tasks end, on the CPU, only when their transfers have.
        present: Notified of each collective.

    Attributes:
        overhead_ns: Host time of the pushes since `begin`, without the collective calls themselves.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        group: dist.ProcessGroup,
        on_device: bool,
        blocks: bool = False,
        present: Attendance | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._present = present
        self._on_device = on_device
        self._waits = blocks and not on_device
        self._tasks: list[EngineTask] = []
        self._late: list[EngineTask] = []
        self._call_ns = 0
        self.overhead_ns = 0

    def begin(self, recorder: Recorder) -> None:
        """A step begins; `recorder` is notified of its frames."""
        self._recorder = recorder
        self._tell(self._late)  # of the step before: they end in this one
        self._late = []
        self._tasks.clear()
        self.overhead_ns = 0

    def run(
        self, name: str, exchange: "Callable[[], Future[Any] | None]", variable: Variable
    ) -> None:
        """Start an exchange that writes `variable`, in the frame of that name."""
        begin = time.perf_counter_ns()
        if self._present is not None:
            self._present.call()
        timed = partial(self._timed, name, exchange)
        task = self._engine.push(timed, writes=(variable,), lane="communication", name=name)
        self._tasks.append(task)
        # What waits runs in a thread of its own, and takes nothing of this one's time.
        called_ns = 0 if self._waits else self._call_ns
        self.overhead_ns += time.perf_counter_ns() - begin - called_ns

    def broadcast(self, name: str, flats: Sequence[Tensor], variable: Variable) -> None:
        """Overwrite with what worker 0 has."""
        self.run(name, partial(self._broadcast, flats), variable)

    def record(self) -> None:
        """Record how long the transfers took that are over, and of others as the next step begins.

        On GPUs it knows by events.
        """
        self._late = [] if self._on_device else [task for task in self._tasks if not task.is_done]
        # A task of this lane ends with its transfer, so its stamps are those of the exchange.
        self._tell([task for task in self._tasks if task not in self._late])

    def _tell(self, tasks: Sequence[EngineTask]) -> None:
        if not self._on_device:
            self._recorder.current.closed += [
                (task.name, task.record.kind, task.start_ns, task.stop_ns) for task in tasks
            ]

    def _timed(self, name: str, fn: Callable[[], Any]) -> Any:
        """Run in the lane: the call between two stamps, its host time noted."""
        begin = time.perf_counter_ns()
        recorder = self._recorder
        is_stamped = isinstance(recorder.clock, DeviceClock) and recorder.current.is_sampled
        start = recorder.clock.stamp() if is_stamped else 0
        future = fn()
        if self._waits and future is not None:
            future = future.wait() and None
        if is_stamped:
            stop = recorder.clock.stamp()
            recorder.current.closed.append((name, "communication", start, stop))
        self._call_ns = time.perf_counter_ns() - begin
        return future

    def _broadcast(self, flats: Sequence[Tensor]) -> Any:
        if self._on_device:
            for flat in flats:
                dist.broadcast(flat, group=self._group, group_src=0)
            return None
        works = [
            dist.broadcast(flat, group=self._group, group_src=0, async_op=True) for flat in flats
        ]
        return torch.futures.collect_all([work.get_future() for work in works if work])


def all_gather(part: Tensor, group: dist.ProcessGroup, size: int) -> Tensor:
    """[size, ...] of what each of `size` workers has, by rank."""
    found = part.new_empty((size, *part.shape))
    flat_collectives.all_gather(_bytes(found), _bytes(part.contiguous()), group)
    return found


def all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Of [size, ...], row r of which goes to worker r: [size, ...] of what the workers have for this one."""
    found = torch.empty_like(rows, memory_format=torch.contiguous_format)
    flat_collectives.all_to_all(_bytes(found), _bytes(rows.contiguous()), group)
    return found


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)
