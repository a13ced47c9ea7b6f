"""The virtual clock: runs tasks on lanes as the engine does, with given durations.

A task waits for the earlier tasks that it depends on through variables (it reads what they write, or
writes what they read or write), and for its lane. Lanes run in the order given, one task at a time;
`loader` and `disk`, whose threads take what is ready, by priority. While all lanes of `slowdown` are
active, each advances at the rate 1 / slowdown; when one stops, the other runs at full rate again. A task
that hinders others in a way of its own brings its own slowdown.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

from ridgeline.simulator.frames import Frame
from ridgeline.timeline import Lane, Span

READY_ORDER_LANES: frozenset[Lane] = frozenset({"loader", "disk"})
"""Lanes whose thread takes the ready task of highest priority, as in the engine."""


class SimTask(Frame, frozen=True, kw_only=True):
    """A frame with a duration. It starts no earlier than `release_ns`; higher priorities go first.

    `slowdown` holds in place of that of the others while this task runs; None for a task like the others.
    """

    duration_ns: int
    release_ns: int = 0
    priority: int = 0
    slowdown: dict[Lane, float] | None = None

    @classmethod
    def of(cls, frame: Frame, seconds: float, release_s: float = 0.0) -> Self:
        """A frame, or a part of it, that takes so long, in whole nanoseconds."""
        return cls(
            name=frame.name,
            lane=frame.lane,
            reads=frame.reads,
            writes=frame.writes,
            duration_ns=round(seconds * 1e9),
            release_ns=round(release_s * 1e9),
        )


def run_tasks(
    tasks: Sequence[SimTask], slowdown: Mapping[Lane, float] | None = None
) -> tuple[Span, ...]:
    """When each task runs: one span a task, in the order of `tasks`, from time 0.

    Deterministic: what happens at one time happens by priority, then in the order of `tasks`. Without
    `slowdown` all times are exact sums of durations.

    Args:
        tasks: In the order in which the host issues them.
        slowdown: Lanes that hinder each other while all of them are active, and how many times longer
            each then takes (at least 1).

    Source: discrete events with fluid rates; the two-phase treatment of overlapped communication is
        that of Galvatron (Miao et al., VLDB 2023), here with a rate for either side.
    """
    return _Clock(tasks, slowdown or {}).run()


def dependencies(tasks: Sequence[Frame]) -> list[list[int]]:
    """For each task the earlier tasks that it must wait for through variables."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    found: list[list[int]] = []
    for index, task in enumerate(tasks):
        waits = {writer[name]: None for name in (*task.reads, *task.writes) if name in writer}
        # Writers wait for readers too: a value must not change while it is read.
        for name in task.writes:
            waits |= dict.fromkeys(readers.get(name, ()))
        for name in task.reads:
            if name not in task.writes:
                readers.setdefault(name, []).append(index)
        for name in task.writes:
            writer[name] = index
            readers.pop(name, None)
        found.append(list(waits))
    return found


class _Clock:
    def __init__(self, tasks: Sequence[SimTask], slowdown: Mapping[Lane, float]) -> None:
        self.tasks = tasks
        # A lane by itself hinders nobody.
        self.slowdown = slowdown if len(slowdown) > 1 else {}
        self.can_contend = bool(self.slowdown) or any(task.slowdown for task in tasks)
        self.factors: Mapping[Lane, float] = {}
        self.waits = [0] * len(tasks)
        self.successors: list[list[int]] = [[] for _ in tasks]
        for index, before in enumerate(dependencies(tasks)):
            self.waits[index] = len(before)
            for other in before:
                self.successors[other].append(index)
        self.starts = [0.0] * len(tasks)
        self.ends = [0.0] * len(tasks)
        self.queues: dict[Lane, deque[int]] = {}
        self.ready: dict[Lane, list[tuple[int, int]]] = {}
        for index, task in enumerate(tasks):
            if task.lane in READY_ORDER_LANES:
                self.ready.setdefault(task.lane, [])
            else:
                self.queues.setdefault(task.lane, deque()).append(index)
        self.active: dict[Lane, int] = {}
        self.left: dict[Lane, float] = {}
        self.since: dict[Lane, float] = {}
        self.tickets: dict[Lane, int] = {}
        self.events: list[tuple[float, int, int, int]] = []
        self.num_done = 0

    def run(self) -> tuple[Span, ...]:
        for index, task in enumerate(self.tasks):
            if not self.waits[index] and task.lane in READY_ORDER_LANES:
                heapq.heappush(self.ready[task.lane], (-task.priority, index))
        lanes: tuple[Lane, ...] = (*self.queues, *self.ready)
        # All lanes start before rates are set, which depend on who is active.
        for lane in lanes:
            self._start(lane, 0.0)
        self._contend(0.0)
        while self.events:
            now, _, index, ticket = heapq.heappop(self.events)
            lane = self.tasks[index].lane
            if ticket < 0:
                self._start(lane, now)
            # Promises made at an earlier rate are still in the heap, and are passed over here.
            elif self.active.get(lane) == index and self.tickets[lane] == ticket:
                self._finish(lane, index, now)
            self._contend(now)
        assert self.num_done == len(self.tasks), "tasks wait for each other in push order only"
        return tuple(
            Span(name=t.name, lane=t.lane, start_ns=round(start), end_ns=round(end))
            for t, start, end in zip(self.tasks, self.starts, self.ends, strict=True)
        )

    def _head(self, lane: Lane) -> int | None:
        if lane in self.ready:
            return self.ready[lane][0][1] if self.ready[lane] else None
        queue = self.queues[lane]
        # Not the first ready one: a lane with a queue works strictly in the order of issue.
        return queue[0] if queue and not self.waits[queue[0]] else None

    def _start(self, lane: Lane, now: float) -> None:
        if lane in self.active:
            return
        index = self._head(lane)
        if index is None:
            return
        task = self.tasks[index]
        if task.release_ns > now:
            # Ticket -1: an event that only looks at the lane again, and ends nothing.
            heapq.heappush(self.events, (float(task.release_ns), -task.priority, index, -1))
            return
        if lane in self.ready:
            heapq.heappop(self.ready[lane])
        else:
            self.queues[lane].popleft()
        self.active[lane] = index
        self.starts[index] = now
        self.left[lane] = float(task.duration_ns)
        self.since[lane] = now
        self._promise(lane, now)

    def _finish(self, lane: Lane, index: int, now: float) -> None:
        del self.active[lane]
        self.ends[index] = now
        self.num_done += 1
        # A dict, since a set would start lanes in another order from run to run.
        woken: dict[Lane, None] = {lane: None}
        for other in self.successors[index]:
            self.waits[other] -= 1
            if not self.waits[other]:
                task = self.tasks[other]
                woken[task.lane] = None
                if task.lane in self.ready:
                    heapq.heappush(self.ready[task.lane], (-task.priority, other))
        for other_lane in woken:
            self._start(other_lane, now)

    def _promise(self, lane: Lane, now: float) -> None:
        """Schedule the end of the lane's task at its present rate; earlier promises become void."""
        index = self.active[lane]
        self.tickets[lane] = self.tickets.get(lane, 0) + 1
        end = now + self.left[lane] * self.factors.get(lane, 1.0)
        heapq.heappush(self.events, (end, -self.tasks[index].priority, index, self.tickets[lane]))

    def _contend(self, now: float) -> None:
        """Change rates when lanes that hinder each other became all active, or no longer are."""
        if not self.can_contend:
            return
        before, wanted = self.factors, self._present_factors()
        if wanted == before:
            return
        self.factors = wanted
        for lane in dict.fromkeys((*before, *wanted)):
            if lane in self.active:
                # `left` counts seconds at full rate, so what passed since is worth less where the lane was
                # slowed.
                done = (now - self.since[lane]) / before.get(lane, 1.0)
                self.left[lane] = max(0.0, self.left[lane] - done)
                self.since[lane] = now
                self._promise(lane, now)

    def _present_factors(self) -> Mapping[Lane, float]:
        """How many times as long the active lanes take at this moment; empty where none hinders another."""
        running = [self.tasks[index].slowdown for index in self.active.values()]
        # Of several with a slowdown of their own the first active one decides.
        own = next((slowdown for slowdown in running if slowdown is not None), None)
        slowdown = self.slowdown if own is None else own
        return slowdown if all(lane in self.active for lane in slowdown) else {}
