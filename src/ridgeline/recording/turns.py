"""Rivals that are timed in turns, so that a change of the machine's speed meets all of them alike."""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

MOST_CALLS = 1000
"""In a block: what is faster than that is timed well enough."""

Name = TypeVar("Name")
Taken = TypeVar("Taken")


def turns_of(rivals: Mapping[Name, Callable[[], Taken]]) -> Iterator[dict[Name, Taken]]:
    """What each rival returns, turn after turn without end; every second turn goes the other way round."""
    names = list(rivals)
    # Alternately, so that nobody always runs behind the same rival.
    for order in itertools.cycle((names, names[::-1])):
        yield {name: rivals[name]() for name in order}


def calls_in(block_s: float, once_s: float) -> int:
    """Calls that fill a block of so many seconds, at `once_s` each: 1 to `MOST_CALLS`."""
    # A call that the clock does not resolve takes no time.
    return max(1, min(MOST_CALLS, round(block_s / max(once_s, 1e-9))))


def call_s(
    call: Callable[[], Any], calls: int = 1, wait: Callable[[], object] = lambda: None
) -> float:
    """Mean seconds of a call in a block of `calls`, by the host's clock; `wait` before and behind them."""
    wait()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - begin) / calls


def wait_for(*devices: torch.device) -> None:
    """Wait for the GPUs among the devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
