"""How often a process lost a core while it computed, to other programs or to threads of its own."""

import resource

LEAST_S = 0.1
"""Of computing, below which a count says nothing."""
MUCH_PER_S = 100.0
"""For each second of computing. On two cores without other programs a process lost one twice with one thread
and 17 to 34 times with two; beside three other programs 250 to 270 times with two. Its threads wait for the
one that lost its core then: a step of 0.4 ms took 36 to 58."""


class Preemptions:
    """Counts, from when it is made, how often threads of this process had to stop in favour of others.

    Source: `ru_nivcsw` in getrusage(2), the involuntary context switches of all threads of a process.
    """

    def __init__(self) -> None:
        self._before = resource.getrusage(resource.RUSAGE_SELF)

    def per_s(self) -> float | None:
        """Times for each second that the process computed; None where it has not computed for long enough."""
        before, now = self._before, resource.getrusage(resource.RUSAGE_SELF)
        computed_s = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
        if computed_s < LEAST_S:
            return None
        return (now.ru_nivcsw - before.ru_nivcsw) / computed_s
