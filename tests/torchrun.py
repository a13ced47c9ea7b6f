"""Starts the workers of a test as `torchrun --standalone` does, forked from a process that has imported torch.

    python torchrun.py WORKERS SCRIPT ARGUMENT...

Each worker finds its place in the environment, and the store in the process that it was forked from. Where one
fails, the others, which may wait for it for ever, are killed. Processes that begin `later` are forked with them, so
that they need not import torch while the workers wait for them.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))  # also where this is run as a script

from warm import WARM

LATER, GOES_ON = "TORCHRUN_LATER", "TORCHRUN_GOES_ON"
"""To the main process how many processes may begin later, to workers the sockets of these; and that the other
workers go on where one was killed."""


def torchrun(
    workers: int, script: Path, *arguments: object, check: bool = True, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run a script in so many workers of one thread each, to its end; on the GPUs that the test sees."""
    done = subprocess.run(
        **_started(workers, script, arguments, environment), capture_output=True, check=False
    )
    assert done.returncode == 0 or not check, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done


def talking(workers: int, script: Path, *arguments: object) -> "subprocess.Popen[str]":
    """Workers that run while a test writes to the standard input of rank 0 and reads its output."""
    return subprocess.Popen(
        **_started(workers, script, arguments, {}), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


class Later:
    """A process forked with the workers, which one of them has run the same script by itself."""

    def __init__(self, *arguments: object, **environment: str) -> None:
        first, _, rest = os.environ[LATER].partition(",")
        os.environ[LATER] = rest
        self._socket = socket.socket(fileno=int(first))
        self._told = b""
        words = {"arguments": [*map(str, arguments)], "environment": environment}
        self._socket.sendall(json.dumps(words).encode() + b"\n")

    def poll(self) -> int | None:
        """Its exit status as of `subprocess.Popen`; None while it runs."""
        while select.select([self._socket], [], [], 0)[0]:
            if not self._read():
                return int(self._told.splitlines()[-1])
        return None

    def communicate(self) -> tuple[str, int]:
        """What it has written until its end, and its exit status."""
        while self._read():
            pass
        self._socket.close()
        *lines, status = self._told.decode().splitlines(keepends=True)
        return "".join(lines), int(status)

    def _read(self) -> bytes:
        found = self._socket.recv(1 << 16)
        self._told += found
        return found


def _started(
    workers: int, script: Path, arguments: tuple[object, ...], environment: dict[str, str]
) -> dict[str, Any]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = WARM.command(__file__, workers, script, *arguments, environment=variables)
    return {"args": command, "env": variables, "text": True}


def main() -> int:
    """Be the workers, or the process that waits for them."""
    import torch.distributed as dist

    import ridgeline.runtime.training.loop  # noqa: F401 - what all of them import

    workers = int(sys.argv[1])
    gc.freeze()  # what was imported is garbage of none of them
    later, ends = _fork_later(int(os.environ.pop(LATER, "0")))
    read, write = os.pipe()
    running = set()
    for rank in range(workers):
        child = os.fork()
        if not child:
            os.close(write)
            for own in later.values():
                own.close()
            os.environ[LATER] = ",".join(str(end.detach()) for end in ends)
            _work(rank, workers, port=os.read(read, 5).decode())
            return 0
        running.add(child)
    for end in ends:
        end.close()
    # Made after the forks, since no thread comes along.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, b"%05d" % store.port * workers)
    status = _wait(running, later, goes_on=GOES_ON in os.environ)
    # An ordinary end would look at all that was imported once more, for 0.3 s of CPU, and test nothing.
    os._exit(status)


def _fork_later(count: int) -> tuple[dict[int, socket.socket], list[socket.socket]]:
    """Processes to what they write to, and the other ends, for workers; each waits for its arguments."""
    later: dict[int, socket.socket] = {}
    ends: list[socket.socket] = []
    for _ in range(count):
        end, own = socket.socketpair()
        child = os.fork()
        if not child:
            for other in (end, *ends, *later.values()):
                other.close()
            _work_later(own)
        later[child] = own
        ends.append(end)
    return later, ends


def _work_later(own: socket.socket) -> None:
    """Be such a process, until its end; one that no worker needs ends with them."""
    line = own.makefile().readline()
    if not line:
        os._exit(0)
    asked = json.loads(line)
    os.dup2(own.fileno(), sys.stdout.fileno())
    os.environ |= asked["environment"]
    sys.argv[1:] = [sys.argv[2], *asked["arguments"]]
    _run()
    sys.exit(0)


def _work(rank: int, workers: int, port: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers)}
    os.environ |= {"WORLD_SIZE": str(workers), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    sys.argv[1:] = sys.argv[2:]
    _run()


def _run() -> None:
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)
    sys.modules["torchrun"] = sys.modules[__name__]  # where a script imports `Later` from
    runpy.run_path(script, run_name="__main__")


def _wait(running: set[int], later: dict[int, socket.socket], *, goes_on: bool) -> int:
    """0, or the status of the first worker that failed; the workers are told that of who began later."""
    failed = 0
    while running or later:
        child, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if child in later:
            with later.pop(child) as end:
                _say(end, f"{code}\n")
            continue
        running.remove(child)
        if code and not failed and not goes_on:
            failed = code
            for other in (*running, *later):
                os.kill(other, signal.SIGKILL)
    return failed


def _say(end: socket.socket, line: str) -> None:
    # The workers have ended before one that they did not need.
    with contextlib.suppress(BrokenPipeError):
        end.sendall(line.encode())


if __name__ == "__main__":
    sys.exit(main())
