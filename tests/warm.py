"""A process that has imported torch and Ridgeline, once for all tests of a run: scripts run in forks of it.

Starting a script otherwise takes 2 s of CPU before its first line. It has what it would have had: its arguments, folder,
streams and environment. Only variables that are read while modules are imported must be those that this process had
when tests began; with others, or with GPUs, a script is started as ever.
"""

import atexit
import contextlib
import ctypes
import gc
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

AT_IMPORT = (
    *("OMP_", "GOMP_", "MKL_", "KMP_", "TORCH", "PYTORCH", "TRITON", "_TORCH"),
    *("AOT_INDUCTOR_", "PYTHON", "LD_", "MALLOC_", "GLIBC_"),
)
"""How variables begin that are read while a process starts or modules are imported."""
LATER = (
    *("TORCHRUN_", "TORCHELASTIC_", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
    # Set by torch's compiler or scikit-learn in a process that has imported or used them: also in one that runs
    # tests, from some test on.
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_", "TRITON_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)  # fmt: skip
"""And those among them that are not."""
TAKEN_ALONG = ("PYTHONPATH", "PYTHONUNBUFFERED")
"""Nor are these, for processes that were started and ask then: they hand over their path, and are unbuffered."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Nor these, where modules may have another number of threads than this process, which is then set."""
ADDRESS = "WARM_PROCESS"
"""Tells processes that tests or Ridgeline start where it is (`starts/sitecustomize.py`)."""
CHECKED_ADDRESS = "WARM_CHECKED_PROCESS"
"""And where another one is, for what is to run on a heap that is checked."""
CHECKED = {"MALLOC_CHECK_": "3", "LD_PRELOAD": "libc_malloc_debug.so.0"}
"""Read where a process starts: as `ridgeline.packages.program_trial` sets them for its children."""
OWN_THREADS = Path("/proc/self/task")
RELAY = str(Path(__file__).parent / "starts" / "relay.py")
NAMESPACES = {"mnt": 0x00020000, "net": 0x40000000}
"""Where a caller may be on a host of its own. Source: CLONE_NEWNS and CLONE_NEWNET of linux/sched.h."""


class Warm:
    """The warm process of this one, from the first script on until this one ends, with further variables."""

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        # What a test sets for its own script is not for those of other tests.
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(variables or {})}
        self._environment = {**os.environ, **own}
        self._process: subprocess.Popen[bytes] | None = None
        self._address = ""

    def command(
        self, script: Path | str, *words: object, environment: Mapping[str, str]
    ) -> list[str]:
        """What runs a script, with that environment: a relay to a warm process, or Python itself."""
        own = [str(script), *map(str, words)]
        if not _fits(environment, self._environment):
            return [sys.executable, *own]
        return [sys.executable, "-I", "-S", RELAY, self.address(), *own]

    def address(self) -> str:
        """Where it listens. It imports nothing before it is asked for something."""
        if self._process is None:
            # Not in a folder of pytest's, whose name may be longer than an address can be.
            self._address = f"{tempfile.mkdtemp(prefix='ridgeline-warm-')}/socket"
            self._process = subprocess.Popen(
                [sys.executable, __file__, self._address],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert self._process.stdout is not None
            assert self._process.stdout.readline() == b"listening\n", "it says why"
        return self._address

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.communicate()
        self._process = None


WARM = Warm()
WARM_CHECKED = Warm(CHECKED)


def _fits(asked: Mapping[str, str], warm: Mapping[str, str], but: tuple[str, ...] = ()) -> bool:
    """Whether a script would import as the warm process did."""
    left_out = (*LATER, *but)
    return asked.get("CUDA_VISIBLE_DEVICES") == "" and all(
        asked.get(name) == warm.get(name)
        for name in asked.keys() | warm.keys()
        if name.startswith(AT_IMPORT) and not name.startswith(left_out)
    )


def serve(address: str) -> None:
    """Be the warm process: until the standard input ends, which nobody writes to."""
    given = dict(os.environ)
    atexit.register(_end_early)  # before all that is imported, so that it runs last
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the tests, which then end this
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen()
        os.write(1, b"listening\n")
        is_warm = False
        while 0 not in (ready := select.select([door, 0], [], [])[0]):
            if door in ready:
                if not is_warm:
                    _warm_up()
                    is_warm = True
                caller, _ = door.accept()
                if not os.fork():
                    door.close()
                    _answer(caller, given)
                caller.close()
    Path(address).unlink()
    Path(address).parent.rmdir()


def _warm_up() -> None:
    import ridgeline.runtime.training.loop  # what most scripts import

    if CHECKED.items() <= os.environ.items():
        # All that runs there was compiled; others would only end later for what they do not use.
        import torch._inductor.compile_fx

        import ridgeline.packages.program_worker
    else:
        # What scripts, workers and servers import as they run: 0.1 s of CPU each for a store, 0.3 s for a decision.
        import torch.distributed.run  # noqa: F401

        import ridgeline.cli.kvserver
        import ridgeline.cli.training.worker
        import ridgeline.lint.child_worker
        import ridgeline.runtime.kvstore
        import ridgeline.session  # noqa: F401

    gc.freeze()  # what was imported is garbage of none of them
    signal.signal(signal.SIGCHLD, _collect)


def _end_early() -> None:
    """Of a process with one thread: end when Python has ended, for itself and all that the script made.

    What would follow takes torch's tables of operators apart, for 0.2 s of CPU: two thirds of what a fork takes that
    does little. Other threads might then miss them, so that a process that has some ends as ever.
    """
    if len(list(OWN_THREADS.iterdir())) == 1:
        libc = ctypes.CDLL(None)
        libc.on_exit(
            libc._exit, None
        )  # called first, with the status; Python has written what is buffered


def _collect(*_: object) -> None:
    """Those who waited for scripts, and have told."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _answer(caller: socket.socket, given: Mapping[str, str]) -> NoReturn:
    """Fork who runs a script, wait for its end, and tell; a script whose caller is gone is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, handles, _, _ = socket.recv_fds(caller, 1, 5)
    asked = json.loads(caller.makefile().readline())
    but = (*(TAKEN_ALONG if asked["path"] else ()), *(THREADS if _threads(asked) else ()))
    if not _fits(asked["environment"], given, but):
        with contextlib.suppress(BrokenPipeError):  # whoever asked is gone
            caller.sendall(b"0\n")
        os._exit(0)
    child = os.fork()
    if not child:
        caller.close()
        _run(asked, handles)
    for handle in handles:
        os.close(handle)  # whoever reads what the script writes learns of its end
    # Each by itself: whoever is gone before the number is told takes the script along, too.
    with contextlib.suppress(BrokenPipeError):
        caller.sendall(f"{child}\n".encode())
    if caller in select.select([caller, os.pidfd_open(child)], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    if asked["takes_along"]:
        with contextlib.suppress(ProcessLookupError):  # it ended before it had a group
            os.killpg(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        caller.sendall(str(code).encode())
    os._exit(0)


def _threads(asked: dict[str, Any]) -> int:
    """Of a module that may have a number of its own: what its environment says, or one a core; 0 for others."""
    said = asked["environment"].get("OMP_NUM_THREADS", str(len(asked["cores"])))
    return int(said) if asked["has_threads"] and said.isdecimal() else 0


def _run(asked: dict[str, Any], handles: list[int]) -> NoReturn:
    """Run a script or module as Python does, and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if asked["takes_along"]:
        os.setsid()
    for number, stream in enumerate(handles[:3]):
        os.dup2(stream, number)
    _go_to(handles[3:])
    for handle in handles:
        os.close(handle)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ |= asked["environment"]
    for limit, wanted in asked["limits"]:
        if resource.getrlimit(limit) != tuple(wanted):
            resource.setrlimit(limit, tuple(wanted))
    os.sched_setaffinity(0, asked["cores"])
    module, sys.argv = asked["module"], asked["words"]
    sys.path[:] = asked["path"] or [str(Path(sys.argv[0]).parent), *sys.path[1:]]
    for stream in (sys.stdout, sys.stderr) if asked["path"] else ():
        stream.reconfigure(write_through=True)
    if asked["parent"]:
        os.getppid = lambda: asked["parent"]
    if _threads(asked) > 1:
        from ridgeline.workers.host_threads import set_threads

        set_threads(_threads(asked))
    # What either raises ends this process, as it would.
    if module:
        sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()


def _go_to(places: list[int]) -> None:
    """Enter the namespaces of the caller, where they are others."""
    for place, (name, kind) in zip(places, NAMESPACES.items(), strict=True):
        if os.fstat(place).st_ino != Path("/proc/self/ns", name).stat().st_ino:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(place, kind):
                raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    serve(sys.argv[1])
