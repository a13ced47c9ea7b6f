"""Case `task`: what it costs to have something done by another thread, when it is next to nothing."""

import importlib
import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ridgeline.engine import Engine
from ridgeline.experiments.contests import nothing
from ridgeline.experiments.ways.case import Case, Contest, Way, WayRunner

TASKS = {True: 5000, False: 20000}
"""Quick or not to the tasks of a run."""
NO_DASK = "" if importlib.util.find_spec("dask") else "dask (pip install dask)"


def cost_case(*, quick: bool) -> Case:
    """Tasks without work on one worker thread: what they take is the cost of a task."""
    num = TASKS[quick]
    return Case(
        name="task",
        title=f"{num} tasks that do nothing, on one thread, then waited for",
        prepare=partial(_contest, num),
        threads=1,
        units=num,
        unit="task",
        calls=1,
    )


def _contest(num: int) -> Contest:
    return Contest(
        ways=(
            Way("concurrent.futures", "peer", partial(_pool, num)),
            Way("dask, threaded", "peer", partial(_dask, num), NO_DASK),
            Way("ridgeline engine, independent", "ridgeline", partial(_engine, num, "none")),
            Way("ridgeline engine, one variable each", "ridgeline", partial(_engine, num, "own")),
            Way("ridgeline engine, one chain", "ridgeline", partial(_engine, num, "same")),
        )
    )


def _pool(num: int) -> WayRunner:
    pool = ThreadPoolExecutor(1)

    def run() -> int:
        futures = [pool.submit(nothing) for _ in range(num)]
        for future in futures:
            future.result()
        return num

    return WayRunner(run=run, close=pool.shutdown)


def _dask(num: int) -> WayRunner:
    """Dask's threaded scheduler, on one thread; making the graph is a part of it."""
    get = importlib.import_module("dask.threaded").get
    pool = ThreadPoolExecutor(1)

    def run() -> int:
        graph = {f"task-{number}": (nothing,) for number in range(num)}
        get(graph, list(graph), pool=pool)
        return num

    return WayRunner(run=run, close=pool.shutdown)


def _engine(num: int, variables: str) -> WayRunner:
    """An engine; its tasks write nothing, a variable each (of 64), or all the same one."""
    # Room for all, so that a task is timed and not the waiting for room.
    engine = Engine(max_pending=num)
    # Of 64, not one a task: making a variable is no part of what a task costs.
    count = {"none": 0, "own": 64, "same": 1}[variables]
    written = [(engine.variable(f"v{index}"),) for index in range(count)] or [()]
    # Looked up once: beside a task of microseconds a look-up in each turn would show.
    push: Callable[..., object] = engine.push

    def run() -> int:
        for index in range(num):
            push(nothing, writes=written[index % len(written)], lane="loader")
        engine.wait_all()
        return num

    return WayRunner(run=run, close=engine.close)
