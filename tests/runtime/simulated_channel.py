"""A channel on the CPU whose two streams run late, and as badly interleaved as their events allow."""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SimulatedMoment:
    """An event: happens when its stream reaches it."""

    def __init__(self) -> None:
        self.is_over = False
        self.tick = 0


class SimulatedChannel:
    """Work is queued; a random scheduler runs some of it at every call."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._streams: dict[str, deque[tuple[SimulatedMoment | None, Callable[[], None]]]] = {
            "copy": deque(),
            "consumer": deque(),
        }
        self._tick = 0
        self.given: list[Tensor] = []
        self.addresses: set[int] = set()
        self.copies: list[tuple[SimulatedMoment, SimulatedMoment]] = []

    device = torch.device("cpu")

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def takes(self, leaf: Tensor) -> bool:
        return True

    def needs_staging(self, leaf: Tensor) -> bool:
        return True

    def empty_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def empty_device(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def now(self) -> SimulatedMoment:
        return self._record("consumer")

    def consumer(self) -> Any:
        return "consumer"

    def copy(
        self, pairs: Sequence[tuple[Tensor, Tensor]], after: Sequence[SimulatedMoment]
    ) -> tuple[SimulatedMoment, SimulatedMoment]:
        with self._lock:
            for moment in after:
                self._streams["copy"].append((moment, lambda: None))
            begin = self._record("copy")
            for target, source in pairs:
                self.addresses.add(target.data_ptr())
                self._streams["copy"].append((None, lambda t=target, s=source: t.copy_(s)))
            self.copies.append((begin, self._record("copy")))
            return self.copies[-1]

    def follow(self, moment: SimulatedMoment) -> None:
        with self._lock:
            self._streams["consumer"].append((moment, lambda: None))
            self._run_some()

    def wait(self, moment: SimulatedMoment) -> None:
        with self._lock:
            while not moment.is_over:
                assert self._step(), "the streams wait for each other"

    def is_over(self, moment: SimulatedMoment) -> bool:
        return moment.is_over

    def seconds(self, begin: SimulatedMoment, end: SimulatedMoment) -> float:
        return float(end.tick - begin.tick)

    def give_away(self, memory: Tensor, stream: Any) -> None:
        self.given.append(memory)

    def compute(self, work: Callable[[], None]) -> None:
        """The consumer enqueues work on its stream."""
        with self._lock:
            self._streams["consumer"].append((None, work))
            self._run_some()

    def drain(self) -> None:
        with self._lock:
            while self._step():
                pass
            assert not any(self._streams.values())

    def _record(self, stream: str) -> SimulatedMoment:
        moment = SimulatedMoment()

        def happen() -> None:
            moment.tick, moment.is_over = self._tick, True

        with self._lock:
            self._streams[stream].append((None, happen))
            self._run_some()
        return moment

    def _run_some(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 3))):
            self._step()

    def _step(self) -> bool:
        able = [
            queue
            for queue in self._streams.values()
            if queue and (queue[0][0] is None or queue[0][0].is_over)
        ]
        if not able:
            return False
        self._tick += 1
        self._random.choice(able).popleft()[1]()
        return True
