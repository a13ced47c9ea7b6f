"""Comparing times on a GPU that others may use, too: in turns, and again where something came between.

What disturbs one turn of a run disturbs those of the other runs, too, and the shortest of some turns is least
disturbed. What is left is a device that somebody uses all the time; there nothing can be said.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest
import torch

ATTEMPTS = 4
"""A disturbance that spoils all of them is no accident."""


def in_turns(runs: Mapping[str, Callable[[], object]], *, turns: int = 5) -> dict[str, float]:
    """Seconds of the shortest turn of each run, after one that does not count.

    Cost: Waits for all devices around every turn.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 1):
        for name, run in runs.items():
            _wait()
            begin = time.perf_counter()
            result = run()
            _wait()
            if turn:
                seconds[name].append(time.perf_counter() - begin)
            del result
    return {name: min(taken) for name, taken in seconds.items()}


def holds_when_quiet(
    wrong: Callable[[], str],
    *,
    attempts: int = ATTEMPTS,
    others: Callable[[], str] | None = None,
) -> None:
    """Fail if every attempt finds something wrong; skip if then others use the GPU.

    Args:
        wrong: Measures; says what does not hold, or nothing.
        attempts: At most so many measurements.
        others: Says who else uses the GPU, or nothing.
    """
    found = []
    for _ in range(attempts):
        said = wrong()
        if not said:
            return
        found.append(said)
    if busy := (others or others_on_gpus)():
        pytest.skip(f"{busy}; measured: {'; '.join(found)}")
    pytest.fail("; ".join(found), pytrace=False)


def others_on_gpus() -> str:
    """Which processes other than this one and its children use the GPUs; empty where none is known.

    A container does not see the numbers of processes outside, and none of its own by the same numbers.
    """
    import pynvml

    mine = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    try:
        pynvml.nvmlInit()
        try:
            found = [
                process.pid
                for index in range(torch.cuda.device_count())
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(
                    pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{_properties(index).uuid}")
                )
            ]
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    others = sorted({pid for pid in found if pid not in mine})
    # Where this process goes by another number, one of those found is this one.
    if not others or (len(others) == 1 and not mine & set(found)):
        return ""
    return f"GPUs are used by other processes, too: {', '.join(map(str, others))}"


def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def _wait() -> None:
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
