"""The threads of gloo that carry messages: woken, they wait until a core is free.

Gloo has one such thread for each process group. When a socket has something it tries to take the lock of that
connection; where the caller of a send or receive holds it, the thread asks the sockets again at once, and
again, until it gets it. Under Linux' ordinary policy a thread that is woken preempts the one that runs. So
where two workers send to each other at once, each write wakes the other's thread, both take the cores of the
two that hold the locks, and all wait for each other until the next tick of the scheduler, some 4 ms later.
After it both begin again together, and the same happens again.

A thread of the batch policy preempts no thread when it is woken, so who holds a lock gives it back. It keeps
its share of a core.

Source: gloo/transport/tcp/pair.cc, `Pair::handleEvents`, of torch 2.13; sched(7). Two workers on two cores,
Linux 6.18, in turns under both policies: a written-out ring of 256 KiB took 1.14 and 0.24 ms, of 1 MiB 3.1
and 0.45, of 4 MiB 3.7 and 1.6; gloo's own all-reduce 0.48 and 0.30, 0.78 and 0.49, 3.1 and 1.9. Steps of
ResNet-18 took 0.97 to 0.99 of what they did over loopback, 0.95 to 0.98 over 1 Gbit/s, 0.98 to 1.01 over 100
Mbit/s.
"""

import os
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def calm_message_threads() -> int:
    """Have the message threads of this process preempt no thread when they are woken.

    Called whenever a process group over gloo was made; threads with a policy of their own keep it.

    Returns:
        How many have the batch policy now: 0 where gloo has no such threads, or gives them no name, and
        where the system is not Linux.

    Cost: Reads the names of this process's threads, some 10 us each.
    """
    if not _THREADS.is_dir():
        return 0
    calm = 0
    for thread in _THREADS.iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if (thread / "comm").read_text().strip() == _NAME:
                calm += _is_calm(int(thread.name))
    return calm


def _is_calm(thread: int) -> bool:
    if os.sched_getscheduler(thread) == os.SCHED_OTHER:
        with suppress(PermissionError):  # a sandbox may forbid it: messages then travel as before
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
    return os.sched_getscheduler(thread) == os.SCHED_BATCH
