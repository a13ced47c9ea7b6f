"""A process that has imported torch and Ridgeline, once for all tests of a run: scripts run in forks of it.

Starting a script otherwise takes 2 s of CPU before its first line. It has what it would have had: its arguments, folder,
streams and environment. Only variables that are read while modules are imported must be those that the warm process
was started with; with others, or with GPUs, a script is started as ever.
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
import tempfile
from collections.abc import Mapping
from pathlib import Path

AT_IMPORT = ("OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH", "TRITON", "PYTHON", "LD_", "RIDGELINE")
"""How variables begin that are read while modules are imported."""
AT_RUN = ("TORCHRUN_", "TORCHELASTIC_")
"""And those among them that are not."""
RELAY = str(Path(__file__).with_name("relay.py"))


class Warm:
    """The warm process of this one, from the first script on until this one ends."""

    def __init__(self) -> None:
        self._started: dict[tuple[tuple[str, str], ...], str] = {}
        self._lifelines: list[subprocess.Popen[bytes]] = []

    def command(
        self, script: Path | str, *words: object, environment: Mapping[str, str]
    ) -> list[str]:
        """What runs a script, with that environment: a relay to a warm process, or Python itself."""
        own = [str(script), *map(str, words)]
        if (
            environment.get("CUDA_VISIBLE_DEVICES") != ""
            or environment.get("OMP_NUM_THREADS") != "1"
        ):
            return [sys.executable, *own]
        at_import = _at_import(environment)
        if at_import not in self._started:
            if self._started:
                return [sys.executable, *own]
            self._started[at_import] = self._start(environment)
        return [sys.executable, "-I", "-S", RELAY, self._started[at_import], *own]

    def _start(self, environment: Mapping[str, str]) -> str:
        # Not in a folder of pytest's, whose name may be longer than an address can be.
        place = tempfile.mkdtemp(prefix="ridgeline-warm-")
        address = f"{place}/socket"
        process = subprocess.Popen(
            [sys.executable, __file__, address],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"warm\n", "it says why"
        self._lifelines.append(process)
        return address

    def close(self) -> None:
        """End it."""
        for process in self._lifelines:
            process.communicate()
        self._lifelines.clear()
        self._started.clear()


WARM = Warm()


def _at_import(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted(
            (name, value)
            for name, value in environment.items()
            if name.startswith(AT_IMPORT) and not name.startswith(AT_RUN)
        )
    )


def serve(address: str) -> None:
    """Be the warm process: until the standard input ends, which nobody writes to."""
    import ridgeline.runtime.training.loop  # noqa: F401 - what most scripts import

    gc.freeze()  # what was imported is garbage of none of them
    signal.signal(signal.SIGCHLD, _collect)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        os.write(1, b"warm\n")
        while 0 not in (ready := select.select([door, 0], [], [])[0]):
            if door in ready:
                caller, _ = door.accept()
                if not os.fork():
                    door.close()
                    _answer(caller)
                caller.close()
    Path(address).unlink()
    Path(address).parent.rmdir()


def _collect(*_: object) -> None:
    """Those who waited for scripts, and have told."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(caller: socket.socket) -> None:
    """Fork who runs a script, wait for its end, and tell."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, streams, _, _ = socket.recv_fds(caller, 1, 3)
    asked = json.loads(caller.makefile().read())
    child = os.fork()
    if not child:
        caller.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        _run(asked)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        caller.sendall(str(code).encode())
    os._exit(0)


def _run(asked: dict[str, list[str]]) -> None:
    """Run a script as Python does, and end."""
    os.chdir(str(asked["folder"]))
    os.environ.clear()
    os.environ |= dict(asked["environment"])
    sys.argv = asked["words"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(
        sys.argv[0], run_name="__main__"
    )  # what it raises ends this process, as it would
    sys.exit()


if __name__ == "__main__":
    serve(sys.argv[1])
