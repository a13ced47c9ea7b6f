"""What repairs and waits need of a scheduler, which is made of them."""

import threading
from typing import Any, Protocol

from ridgeline.engine.lanes.lane_table import LaneTable
from ridgeline.engine.middle import SchedulerView
from ridgeline.engine.pacing import Pacing
from ridgeline.engine.safety.late import LatePushes
from ridgeline.engine.task import EngineTask


class SchedulerCore(SchedulerView, Protocol):
    """A scheduler whose state is changed under `lock`.

    Attributes:
        half_done: What repairs the change that an interrupt cut short, and its arguments.
    """

    lock: Any
    half_done: tuple[Any, ...] | None
    idle_gates: list[threading.Lock]
    pacing: Pacing
    lanes: LaneTable
    late: LatePushes

    def finish(self, task: EngineTask, error: BaseException | None) -> None:
        """A task is over: release what it held and start what waited for it."""
        ...

    def start_all(self, ready: list[EngineTask]) -> None:
        """Start tasks that became ready, one after the other."""
        ...

    def fail(self, task: EngineTask, error: BaseException | None) -> None:
        """Count what did not end well."""
        ...
