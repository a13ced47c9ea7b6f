"""Stands for a script that a warm process runs in a fork of itself (`warm.py`): has its streams, and ends as it does.

    python -I -S relay.py SOCKET SCRIPT ARGUMENT...

It imports nothing that takes time.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that are for the script. One that is killed takes it along, since the warm process looks after both."""
LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
STANDS_FOR = "of "
"""Name of this process, before the number of who runs the script."""
PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""
NAMESPACES = ("mnt", "net")
"""Where a script may be another host than the warm process: see `ridgeline.experiments.namespaces`."""


def hand_over(
    warm: str,
    words: list[str],
    *,
    module: str = "",
    path: list[str] | None = None,
    has_threads: bool = False,
    ends_with_parent: bool = False,
    takes_along: bool = False,
) -> int | None:
    """How a script or module ended in a fork of a warm process; None where that imported with other variables.

    Args:
        warm: Address of the warm process.
        words: Script or name of the module, and arguments.
        module: To run instead of a script.
        path: Where its modules are; None: beside the script, and where those of the warm process are.
        has_threads: Whether it may have another number of threads than the warm process.
        ends_with_parent: Whether the kernel is to end it with the parent of this process, as it asks of the kernel
            for itself: the parent that it is told of is this one's.
        takes_along: Whether all that it has started ends with it, as whoever starts it sees to by the group of this
            process, of which those are not.
    """
    if ends_with_parent:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    with socket.socket(socket.AF_UNIX) as process, _Passing() as passing:
        process.connect(warm)
        places = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in NAMESPACES]
        socket.send_fds(process, [b"\0"], [0, 1, 2, *places])
        for place in places:
            os.close(place)
        asked = {
            "words": words,
            "module": module,
            "path": path,
            "has_threads": has_threads,
            "limits": [(one, resource.getrlimit(one)) for one in LIMITS],
            "cores": [*os.sched_getaffinity(0)],
            "parent": os.getppid() if ends_with_parent else 0,
            "takes_along": takes_along,
            "folder": os.getcwd(),  # noqa: PTH109
            "environment": dict(os.environ),
        }
        process.sendall(json.dumps(asked).encode() + b"\n")
        told = process.makefile()
        number = int(told.readline())
        if not number:
            return None
        passing.begin(number)
        # For a test that kills: killed itself, this process takes the script along some moments later.
        with open("/proc/self/comm", "w") as name:  # noqa: PTH123
            name.write(f"{STANDS_FOR}{number}")
        return int(told.readline())


def end(status: int) -> None:
    """End this process as that script ended: by a signal where the status is negative."""
    if status < 0:
        if -status != signal.SIGKILL:  # which has no other meaning
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


class _Passing:
    """Passes signals on to a script, those that come before it is there when it is."""

    def __init__(self) -> None:
        self._number = 0
        self._early: list[int] = []

    def __enter__(self) -> "_Passing":  # noqa: PYI034 - `typing` takes time to import
        self._before = {one: signal.signal(one, self._pass_on) for one in PASSED_ON}
        return self

    def __exit__(self, *_: object) -> None:
        for one, before in self._before.items():
            signal.signal(one, before)

    def begin(self, number: int) -> None:
        """To the process of that number from now on."""
        self._number = number
        while self._early:
            self._pass_on(self._early.pop(0), None)

    def _pass_on(self, sent: int, _: object) -> None:
        if not self._number:
            self._early.append(sent)
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, which is about to be told
            os.kill(self._number, sent)


def main() -> None:
    """Hand over what this process has; or be that script itself."""
    status = hand_over(sys.argv[1], sys.argv[2:])
    if status is None:
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    end(status)


if __name__ == "__main__":
    main()
