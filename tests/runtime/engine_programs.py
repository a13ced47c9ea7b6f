"""Random programs for the engine, what they do one by one, and a run of them on an engine."""

import contextlib
import random
import threading
import time
from typing import Any, NamedTuple

import torch

from ridgeline.engine import Engine, EngineTask, Variable
from ridgeline.engine.lanes.lanes import WorkLane
from ridgeline.engine.task import Finish
from ridgeline.errors import EngineError

LANES = ("loader", "copy-in:1", "communication", "host", "compute:3", "disk", "compute", "copy-in")
"""In the order in which programs use them; `communication` is a lane of futures."""


class Operation(NamedTuple):
    """One thing the pushing thread does. `target`: a variable, or the number of an earlier push."""

    kind: str
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    lane: str = ""
    fails: bool = False
    sleep_s: float = 0.0
    """Gives other threads the chance to overtake; no outcome may depend on it."""
    priority: int = 0
    target: int = 0


class Outcome(NamedTuple):
    """What a program leaves: by variable, and by the number of the operation."""

    data: list[int]
    versions: list[int]
    seen: dict[int, int]
    """What every task computed that ran."""
    waits: dict[int, int | None]
    """By wait: the number of the push that poisoned the variable, or None."""
    refused: set[int]


def random_program(
    seed: int, num_tasks: int, num_variables: int, num_lanes: int, *, faults: bool = True
) -> list[Operation]:
    """A program of pushes and sleeps; with `faults` also failures, deletions, waits, cancellations."""
    draw = random.Random(seed)
    rare = min(0.02, 20 / num_tasks)  # few enough deletions that most variables stay alive
    program: list[Operation] = []
    for number in range(num_tasks):
        variables = [draw.randrange(num_variables) for _ in range(draw.randrange(5))]
        cut = draw.randrange(len(variables) + 1) if draw.random() < 0.2 else len(variables) - 1
        cut = max(cut, 0)
        chance = draw.random() if faults else 1.0
        target = draw.randrange(num_variables)
        if chance < rare:
            program.append(Operation("delete", target=target))
        elif chance < 0.25:  # poison spreads fast
            program.append(Operation("clear_error", target=target))
        elif chance < 0.27:
            program.append(Operation("wait", target=target))
        elif chance < 0.28:
            program.append(Operation("end_batch"))
        elif chance < 0.31 and number:
            program.append(Operation("cancel", target=draw.randrange(max(0, number - 8), number)))
        else:
            program.append(
                Operation(
                    "push",
                    reads=tuple(variables[:cut]),
                    writes=tuple(variables[cut:]),
                    lane=LANES[draw.randrange(num_lanes)],
                    fails=faults and draw.random() < 0.005,
                    sleep_s=draw.random() * 5e-5 if draw.random() < 0.02 else 0.0,
                    priority=draw.choice((0, 0, 0, 1, -1)),
                )
            )
    return program


def run_serially(program: list[Operation], num_variables: int, cancelled: set[int]) -> Outcome:
    """What the program does if every operation ends before the next begins."""
    outcome = Outcome([1] * num_variables, [0] * num_variables, {}, {}, set())
    poison: list[int | None] = [None] * num_variables
    alive = [True] * num_variables
    for number, operation in enumerate(program):
        kind, target = operation.kind, operation.target
        touched = (*operation.reads, *operation.writes)
        if kind in ("delete", "clear_error", "wait"):
            touched = (target,)
        if not all(alive[index] for index in touched):
            outcome.refused.add(number)
        elif kind == "wait":
            outcome.waits[number] = poison[target]
        elif kind in ("delete", "clear_error"):
            alive[target] = kind == "clear_error"
            poison[target] = None
            outcome.versions[target] += 1
        elif kind == "push":
            # What is written too does not count as read.
            reads = [index for index in operation.reads if index not in operation.writes]
            inherited = [poison[i] for i in (*reads, *operation.writes) if poison[i] is not None]
            if number in cancelled:
                error = number
            elif inherited:
                error = inherited[0]
            elif operation.fails:
                error = number
            else:
                error = None
                outcome.seen[number] = compute(outcome.data, operation, number)
            for index in set(operation.writes):
                poison[index] = error
                outcome.versions[index] += 1
    return outcome


def compute(data: list[int], operation: Operation, number: int) -> int:
    """Read what the operation reads and writes, and write."""
    value = sum(31 * data[i] for i in operation.reads) + sum(7 * data[i] for i in operation.writes)
    value = (value + number) % 1000003
    for index in operation.writes:
        data[index] = value + index
    return value


class EngineRun:
    """Runs a program on an engine from one thread.

    Attributes:
        outcome: As of `run_serially`.
        cancelled: Numbers of the pushes whose cancellation succeeded.
        intervals: (begin, end, reads, writes) in nanoseconds of every task that ran.
    """

    def __init__(self, program: list[Operation], num_variables: int, **options: Any) -> None:
        self._program = program
        self.outcome = Outcome([1] * num_variables, [0] * num_variables, {}, {}, set())
        self.cancelled: set[int] = set()
        self.intervals: list[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = []
        self._tasks: dict[int, EngineTask] = {}
        self.engine = Engine(lanes={"communication": FutureLane}, **options)
        self._variables = [self.engine.variable(str(i)) for i in range(num_variables)]

    def run(self) -> "EngineRun":
        """Do everything, close the engine, and fill in the outcome."""
        for number, operation in enumerate(self._program):
            try:
                self._do(number, operation)
            except EngineError as error:
                if "deleted" not in str(error):
                    raise
                self.outcome.refused.add(number)
        with contextlib.suppress(EngineError):  # injected failures that no wait has told
            self.engine.close()
        self.outcome.versions[:] = [variable.version for variable in self._variables]
        return self

    def _do(self, number: int, operation: Operation) -> None:
        engine, variables = self.engine, self._variables
        match operation.kind:
            case "push":
                self._tasks[number] = engine.push(
                    self._work(number, operation),
                    reads=[variables[index] for index in operation.reads],
                    writes=[variables[index] for index in operation.writes],
                    lane=operation.lane,
                    name=f"<{number}>",
                    priority=operation.priority,
                )
            case "cancel":
                task = self._tasks.get(operation.target)
                if task is not None and engine.cancel(task):
                    self.cancelled.add(operation.target)
            case "delete":
                engine.delete(variables[operation.target])
            case "clear_error":
                engine.clear_error(variables[operation.target])
            case "wait":
                self.outcome.waits[number] = self._wait(variables[operation.target])
            case "end_batch":
                with contextlib.suppress(EngineError):
                    engine.end_batch()

    def _wait(self, variable: Variable) -> int | None:
        try:
            self.engine.wait(variable)
        except EngineError as error:
            if "deleted" in str(error):
                raise
            return int(str(error).partition("<")[2].partition(">")[0])
        return None

    def _work(self, number: int, operation: Operation) -> Any:
        def work() -> Any:
            begin = time.perf_counter_ns()
            if operation.sleep_s:
                time.sleep(operation.sleep_s)
            if operation.fails:
                raise ValueError("broken")
            self.outcome.seen[number] = compute(self.outcome.data, operation, number)
            end = time.perf_counter_ns()
            self.intervals.append((begin, end, operation.reads, operation.writes))
            return _done_future() if operation.lane == "communication" else None

        return work


class FutureLane(WorkLane):
    """A lane of futures, as collectives have it."""

    def __init__(self, finish: Finish) -> None:
        super().__init__(finish)


def _done_future() -> Any:
    future: Any = torch.futures.Future()
    future.set_result(threading.get_ident())
    return future


def overlaps(run: EngineRun, num_variables: int) -> list[int]:
    """The variables that were written while somebody else touched them."""
    found = []
    for variable in range(num_variables):
        spans = sorted(
            (begin, end, variable in writes)
            for begin, end, reads, writes in run.intervals
            if variable in reads or variable in writes
        )
        last_write = last_end = 0
        for begin, end, is_write in spans:
            if begin < last_write or (is_write and begin < last_end):
                found.append(variable)
                break
            last_end = max(last_end, end)
            last_write = max(last_write, end) if is_write else last_write
    return found
