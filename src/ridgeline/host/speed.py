"""How fast this process runs Python now, beside the fastest that it has: hosts that others share slow down.

On virtual machines whose cores others use as well, a plain loop was seen to take 0.36 ms, and
for seconds 0.7 to 0.85 ms. What the host limits is 1.3 to 2 times slower then, and measuring in such
seconds predicts for them. So what is measured of the host waits for its usual speed, for a while.
"""

import math
import time
from collections.abc import Callable

SLOW = 1.25
"""A loop that takes this multiple of the fastest is slow: by itself it varies by 10 %."""
MOST_WAIT_S = 4.0
"""Slow seconds were seen to be 3 to 6 in a row. A process waits no longer in all: where a host is busy for
long, it would wait before each measurement."""
_LOOPS = 3
_NUMBERS = range(10_000)


class HostSpeed:
    """Times a loop of Python that nothing but the processor limits.

    Attributes:
        best_s: Seconds of the fastest loop so far.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._left_s = MOST_WAIT_S
        self.best_s = math.inf

    def is_slow(self) -> bool:
        """Whether the host is slower now than this process has known it.

        Cost: About a millisecond.
        """
        seconds = min(self._loop_s() for _ in range(_LOOPS))
        self.best_s = min(self.best_s, seconds)
        return seconds > SLOW * self.best_s

    def wait(
        self, limit_s: float = MOST_WAIT_S, meanwhile: Callable[[], object] = lambda: None
    ) -> bool:
        """Loop until the host is as fast as usual, or the seconds are over; whether it is.

        Args:
            limit_s: For this once; all waiting of a process takes `MOST_WAIT_S` at most.
            meanwhile: Called again and again while it is slow.

        Cost: About a millisecond where it is; keeps a core busy meanwhile, so that its clock stays up.
        """
        begin, limit_s = self._clock(), min(limit_s, self._left_s)
        is_slow = self.is_slow()
        while is_slow and self._clock() - begin < limit_s:
            meanwhile()
            is_slow = self.is_slow()
        self._left_s -= self._clock() - begin
        return not is_slow

    def _loop_s(self) -> float:
        begin, total = self._clock(), 0
        for number in _NUMBERS:
            total += number
        return self._clock() - begin


HOST_SPEED = HostSpeed()
"""Of this process."""
