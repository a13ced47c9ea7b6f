"""What a task costs on the engine, beside concurrent.futures and dask's threaded scheduler.

    python benchmarks/engine.py                     # all parts
    python benchmarks/engine.py --quick             # a tenth of the tasks

Empty functions, so that every second is the schedulers' own. The contenders take turns; figures are
medians over the turns with quartiles, and ratios are taken turn by turn. Seconds are those of the
processor, over all threads: on one core that is the time that passes when nobody else wants the core.
`independent` is the case that
all three have in common: submit everything, then wait for every result, one worker thread, on one core.
The other parts are the engine's own: dependencies, a chain, and a producer that is far faster than the
consumer, where the memory tells whether the queue is bounded. The result goes to `benchmarks/results/`.
"""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from ridgeline.cli.arguments.output_file import output_file
from ridgeline.engine import Engine

RESULTS = Path(__file__).parent / "results"
CONSUMER_S = 10e-3
"""What a task takes whose producer hardly takes any time."""


def nothing() -> None:
    """The work of every task."""


def engine_independent(num_tasks: int, **options: Any) -> float:
    """Processor seconds per task that shares nothing with the others."""
    with Engine(**options) as engine:
        begin = time.process_time()
        for _ in range(num_tasks):
            engine.push(nothing, lane="loader")
        engine.wait_all()
        return (time.process_time() - begin) / num_tasks


def engine_variables(num_tasks: int, *, reads: int, variables: int = 100) -> float:
    """Processor seconds per task that writes one of `variables` in turn and reads some others."""
    with Engine() as engine:
        state = [engine.variable() for _ in range(variables + reads)]
        begin = time.process_time()
        for number in range(num_tasks):
            at = number % variables
            engine.push(nothing, state[at + 1 : at + 1 + reads], (state[at],), lane="loader")
        engine.wait_all()
        return (time.process_time() - begin) / num_tasks


def futures_independent(num_tasks: int) -> float:
    """Processor seconds per submit and result of concurrent.futures."""
    with ThreadPoolExecutor(1) as pool:
        begin = time.process_time()
        for future in [pool.submit(nothing) for _ in range(num_tasks)]:
            future.result()
        return (time.process_time() - begin) / num_tasks


def dask_independent(num_tasks: int) -> float:
    """Processor seconds per task of dask's threaded scheduler, the making of the graph included."""
    from dask.threaded import get

    with ThreadPoolExecutor(1) as pool:
        begin = time.process_time()
        graph = {f"task-{number}": (nothing,) for number in range(num_tasks)}
        get(graph, list(graph), pool=pool)
        return (time.process_time() - begin) / num_tasks


def contenders(num_tasks: int) -> dict[str, Callable[[], float]]:
    """Every measurement by its name, in seconds per task."""
    measured: dict[str, Callable[[], float]] = {
        "engine: independent": lambda: engine_independent(num_tasks),
        "concurrent.futures: independent": lambda: futures_independent(num_tasks),
        "engine: independent, 4 threads": lambda: engine_independent(
            num_tasks, threads={"loader": 4}
        ),
        "engine: independent, serial": lambda: engine_independent(num_tasks, serial=True),
        "engine: 1 write": lambda: engine_variables(num_tasks, reads=0),
        "engine: 1 write, 3 reads": lambda: engine_variables(num_tasks, reads=3),
        "engine: chain": lambda: engine_variables(num_tasks, reads=0, variables=1),
    }
    try:
        import dask  # noqa: F401 - only whether it is there
    except ImportError:
        return measured
    return {**measured, "dask threaded: independent": lambda: dask_independent(num_tasks // 10)}


def fast_producer(seconds: float, **options: Any) -> dict[str, float]:
    """A producer of 64 KiB tasks without pause, a consumer of `CONSUMER_S` each: resident MiB over time.

    Without a bound the producer's own pace shows: how many times faster than the consumer it is.
    """
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    most, pushed = before, 0
    end = time.perf_counter() + seconds

    def task() -> Callable[[], None]:
        payload = bytearray(os.urandom(16) * 4096)
        return lambda: time.sleep(CONSUMER_S) or payload.clear()

    with Engine(**options) as engine:
        while time.perf_counter() < end:
            engine.push(task(), lane="loader", num_bytes=65536)
            pushed += 1
            if pushed % 8 == 0:
                most = max(most, process.memory_info().rss)
        told = engine.statistics()
        left = told.pending
    mib = 1024 * 1024
    return {
        "pushed": pushed,
        "times_the_consumers_pace": round(pushed * CONSUMER_S / seconds, 1),
        "unfinished_at_the_end": left,
        "most_pending": told.most_pending,
        "most_bytes_MiB": round(told.most_bytes / mib, 1),
        "resident_growth_MiB": round((most - before) / mib, 1),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median_us": middle * 1e6, "low_us": low * 1e6, "high_us": high * 1e6}


def measure(num_tasks: int, turns: int, cores: set[int]) -> dict[str, Any]:
    """All contenders in turns on these cores, and the ratios to the engine turn by turn."""
    everyone = contenders(num_tasks)
    seconds: dict[str, list[float]] = {name: [] for name in everyone}
    usual = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        for _ in range(turns):
            for name, run in everyone.items():
                gc.collect()
                seconds[name].append(run())
    finally:
        os.sched_setaffinity(0, usual)
    own = seconds["engine: independent"]
    return {
        "cores": len(cores),
        "per_task": {name: summary(values) for name, values in seconds.items()},
        "times_the_engine": {
            name: round(statistics.median(b / a for a, b in zip(own, values, strict=True)), 2)
            for name, values in seconds.items()
            if "independent" in name and "engine" not in name
        },
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer tasks and turns")
    parser.add_argument(
        "--output", type=output_file, help="JSON file; default: below benchmarks/results/"
    )
    arguments = parser.parse_args()
    num_tasks, turns = (5_000, 5) if arguments.quick else (50_000, 11)
    cores = sorted(os.sched_getaffinity(0))
    date = datetime.datetime.now(datetime.UTC)
    result = {
        "what": "cost of a task on the engine",
        "date": date.isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "cores": len(cores),
        "load_before": os.getloadavg()[0],
        "tasks": num_tasks,
        "turns": turns,
        "switch_interval_s": sys.getswitchinterval(),
        "one_core": measure(num_tasks, turns, {cores[0]}),
        "all_cores": measure(num_tasks, turns, set(cores)),
        "fast_producer": {
            "bounded by count": fast_producer(4.0, max_pending=100),
            "bounded by bytes": fast_producer(4.0, max_pending=10**6, max_bytes=8 << 20),
            "unbounded": fast_producer(0.05, max_pending=10**7),
        },
        "threads_left": threading.active_count(),
    }
    text = json.dumps(result, indent=1)
    print(text)
    output = arguments.output
    if output is None:
        RESULTS.mkdir(exist_ok=True)
        output = RESULTS / f"engine_{len(cores)}-core-CPU_{date:%Y%m%d}.json"
    output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
