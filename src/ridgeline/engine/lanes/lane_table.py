"""The lanes of an engine: kind, index, who runs them, and how long they were busy."""

import threading
from collections.abc import Callable, Mapping

from ridgeline.engine.apart import apart
from ridgeline.engine.arguments import check_factories, check_lane, whole_number
from ridgeline.engine.lanes.lanes import ControlLane, InlineLane
from ridgeline.engine.lanes.threads import FinishAndNext, Recover, ThreadLane
from ridgeline.engine.process import Process
from ridgeline.engine.task import Finish, LaneRecord, LaneRunner
from ridgeline.errors import EngineError
from ridgeline.timeline import LANES, Lane

INLINE = ("host", "compute")
"""Lanes that run in the pushing thread unless threads are asked for."""


class LaneTable:
    """The lanes of one engine by name; those without a factory are made when first used.

    Raises:
        EngineError: a name is of no kind, or a lane has no threads.
    """

    def __init__(
        self,
        lanes: Mapping[str, Callable[[Finish], LaneRunner]],
        *,
        finish: Finish,
        finish_and_next: FinishAndNext,
        recover: Recover,
        process: Process,
        threads: Mapping[str, int],
        serial: bool,
    ) -> None:
        check_factories(threads, lanes)
        self._finish = finish
        self._finish_and_next = finish_and_next
        self._recover = recover
        self._process = process
        self._threads: dict[str, int] = {}
        self._is_serial = serial
        self._lock = threading.RLock()  # see `Scheduler.lock`
        self._is_closed = False
        self.records: dict[str, LaneRecord] = {}
        self.control = _record("engine", "host", 0, ControlLane(finish))
        self.control.is_control = True
        for name, num_threads in threads.items():
            parse_lane(name, "Engine(threads=...)")
            where = f"Engine(threads={{{name!r}: ...}})"
            self._threads[name] = whole_number("threads", num_threads, where, least=1)
        for name, make in lanes.items():
            kind, index = parse_lane(name, "Engine(lanes=...)")
            runner = make(finish)
            check_lane(runner, name)
            self.records[name] = _record(name, kind, index, runner)

    def make(self, name: str, where: str) -> LaneRecord:
        """The lane of this name, made unless it is there; an EngineError where it cannot be."""
        kind, index = parse_lane(name, where)
        # An interrupt while a thread starts would leave it half started; see `apart`.
        apart(self._make, name, kind, index)
        return self.records[name]

    def close(self, *, waits: bool) -> None:
        """Let the threads end once they are through with what is ready; wait until they have."""
        with self._lock:  # without a call inside, where a signal handler could push to a new lane
            self._is_closed = True
        runners = [record.runner for record in list(self.records.values())]
        for runner in runners:
            runner.close()
        for runner in runners:
            if waits and isinstance(runner, ThreadLane):
                runner.await_end()

    def _make(self, name: str, kind: Lane, index: int) -> None:
        with self._lock:
            if name in self.records:
                return
            runner = self._runner(name)
            if isinstance(runner, ThreadLane) and not self._is_closed:
                try:
                    runner.open()
                except RuntimeError as error:
                    runner.close()
                    raise EngineError(
                        f"wanted {runner.num_threads} threads for lane {name!r}, got {error}; end others"
                    ) from error
                if name in self.records:  # made meanwhile, for a finalizer's push
                    runner.close()
                    return
            self.records[name] = _record(name, kind, index, runner)

    def owns(self, record: LaneRecord) -> bool:
        """The lane is of this engine."""
        return record is self.control or self.records.get(record.name) is record

    def _runner(self, name: str) -> LaneRunner:
        num_threads = self._threads.get(name)
        if self._is_serial or (num_threads is None and name in INLINE):
            return InlineLane(self._finish)
        return ThreadLane(
            self._finish_and_next, self._recover, self._process, name, num_threads=num_threads or 1
        )


def _record(name: str, kind: Lane, index: int, runner: LaneRunner) -> LaneRecord:
    keeps_order = not isinstance(runner, InlineLane | ThreadLane)
    return LaneRecord(name, kind, index, runner, keeps_order=keeps_order)


def parse_lane(name: str, where: str) -> tuple[Lane, int]:
    """Kind and index of `kind` or `kind:index`; an EngineError for another kind or no whole index."""
    if isinstance(name, str):
        kind, colon, index = name.partition(":")
        for known in LANES:
            if kind == known and (not colon or (index.isdecimal() and index.isascii())):
                return known, int(index or 0)
    raise EngineError(
        f"wanted a lane of {LANES}, or one of them with an index such as 'copy-in:1', got {name!r} "
        f"for {where}; use one"
    )
