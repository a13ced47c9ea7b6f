"""A program on several threads of the CPU: lane 0 in the calling thread, each other lane in one of its own.

An operator of torch lets go of Python's global lock while it computes, so threads that mostly wait inside
operators run side by side. What they share of Python is a few microseconds an operator.
"""

import statistics
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from ridgeline.autoparallel.graphs.program import Program
from ridgeline.autoparallel.graphs.segments import Environment, Segment
from ridgeline.autoparallel.lanes.issue import IssuedPiece, pieces
from ridgeline.autoparallel.scheduling.schedule import Schedule, check_schedule
from ridgeline.engine.engine import Engine
from ridgeline.engine.task import Variable, nothing
from ridgeline.errors import EngineError
from ridgeline.timeline import Timeline
from ridgeline.workers.host_threads import set_threads

ROUND_TRIPS = 30


class ScheduledPiece(NamedTuple):
    """A piece of the schedule as the engine gets it.

    It reads the variables of the pieces on other lanes that it waits for. It writes its lane's own, which
    keeps the lane's pieces in order; and one of its own, if others wait for it and the lane has further
    pieces, for which they must not wait.
    """

    segment: Segment
    reads: tuple[Variable, ...]
    writes: tuple[Variable, ...]
    lane: str
    name: str


class ThreadProgram:
    """A program whose lanes are threads of an engine; called like the traced function.

    Calls take turns. With one lane everything runs in the calling thread.

    The program is on the CPU; one operator may use so many `threads` while the lanes run side by side.

    Raises:
        ScheduleError: the schedule does not keep an edge of the program, or is for another one.
    """

    def __init__(self, program: Program, schedule: Schedule, *, threads: int = 1) -> None:
        check_schedule(program.dag, schedule)
        self.program = program
        self.schedule = schedule
        self._threads = threads
        self._engine = _engine(schedule.num_lanes, threads)
        # Threads of the engine hold it alive; they end with this object though nobody closes it.
        self._close = weakref.finalize(self, self._engine.close)
        self._lock = threading.Lock()
        self._lanes = [self._engine.variable(lane) for lane in schedule.lanes]
        self._steps = self._make_steps()

    def __call__(self, *args: Any) -> Any:
        """The result for these arguments.

        Raises:
            EngineError: it was closed.

        Cost: Some 10 us a piece of the schedule, and the time that threads take to wake up.
        """
        environment = self.program.bind(*args)
        with self._lock, torch.no_grad():
            # Asked only now: a call in another thread has the number changed while it has its turn.
            before = torch.get_num_threads()
            set_threads(self._threads)
            try:
                # Threads have a mode of their own, and each may write what another has made.
                infers = torch.is_inference_mode_enabled()
                for segment, reads, writes, lane, name in self._steps:
                    run = partial(_inferring, segment) if infers else segment
                    self._engine.push(
                        partial(run, environment), reads, writes, lane=lane, name=name
                    )
                for lane in self._lanes:
                    self._engine.wait(lane)
            except EngineError as error:
                self._recover()
                if error.__cause__ is not None:
                    # As the function itself would have: the engine's notes say where it happened.
                    raise error.__cause__ from None
                raise
            finally:
                set_threads(before)
            return self.program.results(environment)

    def timeline(self) -> Timeline:
        """The pieces of the last call on their lanes, from its first one."""
        recorded = self._engine.timeline("parallelize")
        # The engine records all calls; only the last one's pieces are asked for.
        spans = [span for span in recorded.spans if span.name != _PREPARE][-len(self._steps) :]
        begin = min((span.start_ns for span in spans), default=0)
        shifted = tuple(
            msgspec.structs.replace(
                span, start_ns=span.start_ns - begin, end_ns=span.end_ns - begin
            )
            for span in spans
        )
        end = max((span.end_ns for span in shifted), default=0)
        return Timeline(
            origin="measured", title="parallelize", workers=1, spans=shifted, steps_ns=(end,)
        )

    def close(self) -> None:
        """End the threads; calls afterwards are errors."""
        self._close()

    def _recover(self) -> None:
        """Wait for what still runs, and make the variables usable for the next call."""
        # Errors first: a wait for a variable that holds one would raise it again.
        for variable in {v for step in self._steps for v in step.writes}:
            self._engine.clear_error(variable)
        for variable in self._lanes:
            self._engine.wait(variable)

    def _make_steps(self) -> list[ScheduledPiece]:
        found = pieces(self.schedule)
        num_pieces = Counter(piece.lane for piece in found)
        done: dict[int, Variable] = {}
        for piece in found:
            if piece.signals and num_pieces[piece.lane] == 1:
                done[piece.nodes[-1]] = self._lanes[piece.lane]
            elif piece.signals:
                done[piece.nodes[-1]] = self._engine.variable(f"operation {piece.nodes[-1]}")
        steps: list[ScheduledPiece] = []
        for piece in push_order(found):
            writes = (self._lanes[piece.lane], *([done[piece.nodes[-1]]] if piece.signals else ()))
            steps.append(
                ScheduledPiece(
                    self.program.segment(piece.nodes),
                    tuple(done[node] for node in piece.waits),
                    tuple(dict.fromkeys(writes)),
                    _lane_name(piece.lane),
                    self._name(piece),
                )
            )
        return steps

    def _name(self, piece: IssuedPiece) -> str:
        first = self.program.operations[piece.nodes[0]].node.name
        return first if len(piece.nodes) == 1 else f"{first} and {len(piece.nodes) - 1} more"


def _inferring(segment: Segment, environment: Environment) -> None:
    with torch.inference_mode():
        segment(environment)


def push_order(found: Sequence[IssuedPiece]) -> list[IssuedPiece]:
    """The pieces in the order in which the calling thread pushes them.

    A push to lane 0 returns when the piece has run, so what other lanes could begin with must have been
    pushed before: pieces of lane 0 come as late as what depends on them allows.
    """
    by_lane: dict[int, list[IssuedPiece]] = {}
    for piece in found:
        by_lane.setdefault(piece.lane, []).append(piece)
    pushed: set[int] = set()
    position = dict.fromkeys(by_lane, 0)
    order: list[IssuedPiece] = []

    def advance(lane: int) -> bool:
        """Push the lane's next piece, if what it waits for has been pushed."""
        place = position[lane]
        if place == len(by_lane[lane]) or not pushed.issuperset(by_lane[lane][place].waits):
            return False
        piece = by_lane[lane][place]
        position[lane] = place + 1
        pushed.update(piece.nodes)
        order.append(piece)
        return True

    others = [lane for lane in by_lane if lane != 0]
    while len(order) < len(found):
        num_before = len(order)
        for lane in others:
            advance(lane)
        if len(order) == num_before and not (0 in by_lane and advance(0)):
            raise AssertionError("a schedule has an order in which it can be issued")
    return order


def measure_sync_s() -> float:
    """Seconds from the end of a piece on one thread until one on another thread can begin.

    Cost: A few milliseconds.
    """
    with _engine(2, 1) as engine:
        variable = engine.variable()
        samples: list[float] = []
        for _ in range(ROUND_TRIPS):
            begin = time.perf_counter()
            engine.push(nothing, writes=(variable,), lane=_lane_name(1))
            engine.wait(variable)
            samples.append(time.perf_counter() - begin)
    # There and back are two wake-ups.
    return statistics.median(samples) / 2


def _engine(num_lanes: int, threads: int) -> Engine:
    # No limit: a push that waits for room would wait for pieces that are pushed after it.
    engine = Engine(max_pending=1 << 30)
    before = torch.get_num_threads()
    for lane in range(1, num_lanes):
        engine.push(partial(_prepare_thread, threads), lane=_lane_name(lane), name=_PREPARE)
    engine.wait_all()
    set_threads(before)  # new threads take over what was set last, by any thread
    return engine


_PREPARE = "prepare thread"


def _prepare_thread(threads: int) -> None:
    """Limit the threads of operators that this thread calls; they need no gradients."""
    torch.get_num_threads()  # a thread's first call overwrites its setting by that of the process
    set_threads(threads)
    torch.set_grad_enabled(False)


def _lane_name(lane: int) -> str:
    """The calling thread, or a thread of the engine's."""
    return f"compute:{lane}" if lane else "compute"
