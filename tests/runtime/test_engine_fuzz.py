"""Random programs on the engine do what they do one by one."""

import threading
from typing import Any

import pytest
from engine_programs import EngineRun, overlaps, random_program, run_serially
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ridgeline.engine import Engine


def check(
    seed: int, num_tasks: int, num_variables: int, num_lanes: int, *, faults: bool, **options: Any
) -> None:
    program = random_program(seed, num_tasks, num_variables, num_lanes, faults=faults)
    run = EngineRun(program, num_variables, **options).run()
    expected = run_serially(program, num_variables, run.cancelled)
    assert run.outcome == expected
    assert overlaps(run, num_variables) == []
    statistics = run.engine.statistics()
    assert statistics.pending == 0
    assert statistics.done + statistics.failed >= len(expected.seen)
    assert statistics.cancelled == len(run.cancelled)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_tasks=st.integers(1, 400),
    num_variables=st.integers(1, 100),
    num_lanes=st.integers(1, 8),
    threads=st.integers(1, 4),
    max_pending=st.sampled_from((1, 2, 7, 1024)),
    faults=st.booleans(),
)
def test_programs_equal_their_serial_execution(
    seed: int,
    num_tasks: int,
    num_variables: int,
    num_lanes: int,
    threads: int,
    max_pending: int,
    faults: bool,
) -> None:
    """Data, versions, what every task saw, every wait's error, and that writers were alone."""
    lanes = {"loader": threads, "compute": threads} if threads > 1 else {}
    check(
        seed,
        num_tasks,
        num_variables,
        num_lanes,
        faults=faults,
        threads=lanes,
        max_pending=max_pending,
    )


@settings(max_examples=2)
@given(seed=st.integers(0, 2**32), faults=st.booleans())
@example(seed=0, faults=False)
@example(seed=0, faults=True)
def test_long_programs_equal_their_serial_execution(seed: int, faults: bool) -> None:
    """Likewise for 10,000 operations on 100 variables, 8 lanes, and lanes of 4 threads."""
    threads = {"loader": 4, "copy-in:1": 2, "compute": 4}
    check(seed, 10_000, 100, 8, faults=faults, threads=threads)


@given(seed=st.integers(0, 2**32), num_tasks=st.integers(1, 300), num_variables=st.integers(1, 20))
def test_the_serial_engine_does_the_same(seed: int, num_tasks: int, num_variables: int) -> None:
    """`serial=True` gives the same outcome; nothing is ever left to cancel."""
    program = random_program(seed, num_tasks, num_variables, 8)
    run = EngineRun(program, num_variables, serial=True).run()
    assert run.cancelled == set()
    assert run.outcome == run_serially(program, num_variables, set())


@pytest.mark.timeout(600)
def test_no_wake_up_is_lost() -> None:
    """1,000,000 small tasks, on a lane of one thread and one of three, under a tight bound: all run."""
    counts = [0, 0]
    with Engine(max_pending=256, threads={"loader": 3}) as engine:
        chain = engine.variable()

        def chained() -> None:
            counts[0] += 1

        def alone() -> None:
            counts[1] += 1

        for _ in range(250_000):
            engine.push(chained, writes=(chain,), lane="loader")
            engine.push(alone, lane="disk")
            engine.push(alone, lane="disk")
            engine.push(chained, writes=(chain,), lane="disk")
        engine.wait_all()
        assert chain.version == 500_000
    assert counts == [500_000, 500_000]


def test_threads_that_push_and_wait_at_once_meet_every_wake_up() -> None:
    """Four threads, each waiting for every single task of its own: none sleeps for good."""
    with Engine(max_pending=3, threads={"loader": 2}) as engine:

        def work() -> None:
            mine = engine.variable()
            for _ in range(2000):
                engine.push(int, writes=(mine,), lane="loader")
                engine.wait(mine)
            assert mine.version == 2000

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.statistics().done == 8000
