"""A script in a fork of the warm process has what it would have had, and ends as it would have ended."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from warm import ADDRESS, CHECKED, CHECKED_ADDRESS, RELAY, WARM, WARM_CHECKED

SCRIPT = """
import os, resource, signal, sys
print(resource.getrlimit(resource.RLIMIT_FSIZE)[0], len(os.sched_getaffinity(0)))
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], sys.stdin.read(), "torch" in sys.modules)
print(signal.getsignal(signal.SIGCHLD).name, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
sys.stdout.flush()
print("an error", file=sys.stderr)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[1] == "raises":
    raise ValueError("wrong")
sys.exit(int(sys.argv[1]))
"""
WAITING = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waits", flush=True)
print("got", int(signal.sigwait([signal.SIGTERM])))
sys.exit(5)
"""
LAUNCHED = """
import os, sys
assert "torch" in sys.modules
threads = sys.modules["torch"].get_num_threads()
print(sys.argv[1:], os.getcwd(), sys.path[0], os.environ["RANK"], __name__, threads)
sys.exit(int(sys.argv[1]))
"""
MODULE = """
import os, signal, sys
assert "torch" in sys.modules
if sys.argv[1] == "waits":
    print("waits", flush=True)
    signal.pause()
print(sys.argv[1:], os.getppid(), __name__, __spec__.name, sys.path[0], sys.modules["torch"].get_num_threads())
"""
ASKING = """
import os, relay, sys
how = {"module": "told", "path": [sys.argv[1], *sys.path], "has_threads": True, "ends_with_parent": True}
relay.end(relay.hand_over(os.environ["WARM_PROCESS"], ["told", sys.argv[2]], **how) or 0)
"""
DYING = """
import os, relay, signal, socket, sys
socket.socket.makefile = lambda _: os.kill(os.getpid(), signal.SIGKILL)
relay.hand_over(os.environ["WARM_PROCESS"], [sys.argv[1]])
"""
STARTING = """
import os, signal, sys
if not os.fork():
    signal.pause()
print("started", flush=True)
if sys.argv[1] == "waits":
    signal.pause()
"""
TAKING = """
import os, relay, sys
how = {"module": "starting", "path": [sys.argv[1], *sys.path], "has_threads": True, "takes_along": True}
relay.end(relay.hand_over(os.environ["WARM_PROCESS"], ["starting", sys.argv[2]], **how) or 0)
"""
ENDING = """
import atexit, ctypes, os, signal, sys, threading, warm
libc = ctypes.CDLL(None)
libc.strdup.restype = ctypes.c_void_p
libc.__cxa_atexit(libc.puts, ctypes.c_void_p(libc.strdup(b"late")), None)
atexit.register(warm._end_early)
class Last:
    def __del__(self, write=os.write, printf=libc.printf):
        write(1, b"last,")
        printf(b"buffered,")
last = Last()
if sys.argv[1] == "two":
    threading.Thread(target=signal.pause, daemon=True).start()
sys.exit(3)
"""
IMPORTING = """
import sys
before = set(sys.modules)
import ridgeline.cli.kvserver, ridgeline.runtime.kvstore, ridgeline.session, torch.distributed.run
print(sorted(set(sys.modules) - before))
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"

TELLING = "import traceback; print('warm.py' in str(traceback.extract_stack()))"


MOST_BYTES = 12345 << 10


def limit() -> None:
    """What a process may take, as a child inherits it."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, most))
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])


def usual(**more: str) -> dict[str, str]:
    """The environment of most scripts."""
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.parametrize(("word", "status"), [("0", 0), ("3", 3), ("raises", 1), ("killed", -9)])
def test_a_script_runs_as_if_started(tmp_path: Path, word: str, status: int) -> None:
    """Arguments, folder, environment, streams, limits and signals; only torch is there before it begins."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = usual(GIVEN="given")
    command = WARM.command(script, word, environment=environment)
    assert command[0] == sys.executable
    assert command[1] != str(script)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        input="read",
        preexec_fn=limit,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stdout == f"{MOST_BYTES} 1\n['{word}'] {tmp_path} given read True\nSIG_DFL True\n"
    assert done.stderr.startswith("an error\n")
    assert ("ValueError: wrong" in done.stderr) is (word == "raises")


def test_a_script_finds_imported_what_takes_long(tmp_path: Path) -> None:
    """Stores, decisions and launchers: each fork would import them for itself."""
    script = tmp_path / "script.py"
    script.write_text(IMPORTING)
    environment = usual()
    command = WARM.command(script, environment=environment)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("threads", "more"), [("one", ""), ("two", "late\n")])
def test_what_ends_early_has_ended_for_python(threads: str, more: str) -> None:
    """Its objects are gone and what was written is out; libraries end with it only where it has other threads."""
    asking, places = (
        [sys.executable, "-c", ENDING, threads],
        [Path(RELAY).parents[1], Path(RELAY).parent],
    )
    environment = usual(PYTHONPATH=os.pathsep.join(map(str, places)))
    done = subprocess.run(asking, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, f"last,buffered,{more}", "")


@pytest.mark.parametrize(
    ("sent", "status", "told"), [(signal.SIGTERM, 5, "got 15\n"), (signal.SIGKILL, -9, "")]
)
def test_who_stops_a_script_stops_it(tmp_path: Path, sent: int, status: int, told: str) -> None:
    """It gets the signals of the process that stands for it, and does not outlive that."""
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    command = WARM.command(script, environment=usual())
    with subprocess.Popen(command, env=usual(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        process.send_signal(sent)
        assert process.stdout.read() == told, "its end is that of what it writes"
    assert process.returncode == status


def test_who_is_gone_before_it_hears_of_a_script_stops_it(tmp_path: Path) -> None:
    """As long as it lives, what it would write to stays open."""
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    environment = usual(**{ADDRESS: WARM.address()})
    asking = [sys.executable, "-c", DYING, str(script)]
    with subprocess.Popen(asking, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.read()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("word", ["waits", "ends"])
def test_what_a_module_has_started_ends_with_it(tmp_path: Path, word: str) -> None:
    """Killed, or by itself: that is of no group that its starter could end."""
    (tmp_path / "starting.py").write_text(STARTING)
    asking = [sys.executable, "-c", TAKING, str(tmp_path), word]
    environment = usual(**{ADDRESS: WARM.address()})
    with subprocess.Popen(asking, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        if word == "waits":
            process.kill()
        assert process.stdout.read() == "", "nobody has it open"


@pytest.mark.parametrize(
    "variables",
    [{"CUDA_VISIBLE_DEVICES": "0"}, {"OMP_NUM_THREADS": "2"}, {"TORCH_LOGS": "all"}],
)
def test_what_is_read_at_import_starts_a_script_as_ever(variables: dict[str, str]) -> None:
    """The warm process has imported with other variables."""
    found = WARM.command("script.py", 7, environment=usual(**variables))
    assert found == [sys.executable, "script.py", "7"]


@pytest.mark.parametrize(
    "name",
    ["TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "KMP_INIT_AT_FORK"],
)
def test_what_others_set_in_this_process_does_not_matter(name: str) -> None:
    """Else all scripts were started as ever, once a test has compiled something."""
    assert WARM.command("script.py", environment=usual(**{name: "7"}))[1] == "-I"


@pytest.mark.parametrize(("status", "threads"), [(0, 1), (3, 1), (0, 3)])
def test_a_launcher_and_what_it_launches_run_as_if_started(
    tmp_path: Path, status: int, threads: int
) -> None:
    """Both in forks: the script knows its place, with threads of its own, and its status is told."""
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
            *("launched.py", str(status)),
        ],
        cwd=tmp_path,
        env=usual(OMP_NUM_THREADS=str(threads)),
        capture_output=True,
        text=True,
        check=False,
    )
    told = f"['{status}'] {tmp_path} {tmp_path} 0 __main__ {threads}\n"
    assert done.stdout == told, done.stderr
    assert done.returncode == (1 if status else 0)
    assert (f"exitcode  : {status}" in done.stderr) is bool(status)


@pytest.mark.parametrize(("more", "is_run"), [({}, True), ({"TORCH_LOGS": "all"}, False)])
def test_a_module_of_workers_runs_as_if_started(
    tmp_path: Path, more: dict[str, str], is_run: bool
) -> None:
    """With a path and a number of threads of its own; with other variables that matter it is refused."""
    (tmp_path / "told.py").write_text(MODULE)
    environment = usual(**{ADDRESS: WARM.address(), **more, "OMP_NUM_THREADS": "3"})
    asking = [sys.executable, "-c", ASKING, str(tmp_path), "word"]
    done = subprocess.run(asking, env=environment, capture_output=True, text=True, check=True)
    told = f"['word'] {os.getpid()} __main__ told {tmp_path} 3\n"
    assert done.stdout == (told if is_run else ""), done.stderr


def test_a_module_that_is_to_ends_with_its_parent(tmp_path: Path) -> None:
    """That of the process that stands for it: the kernel knows of no other."""
    (tmp_path / "told.py").write_text(MODULE)
    asking = [sys.executable, "-c", PARENT, "-c", ASKING, str(tmp_path), "waits"]
    environment = usual(**{ADDRESS: WARM.address()})
    with subprocess.Popen(asking, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "waits\n"
        parent.kill()
        assert not parent.stdout.read()


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("ridgeline.probe.groups.group_worker", {}),
        ("ridgeline.cli.training.worker", {}),
        ("ridgeline.lint.child_worker", {}),
        ("ridgeline.packages.program_worker", CHECKED),
    ],
)
def test_workers_of_ridgeline_are_forks(module: str, more: dict[str, str]) -> None:
    """As where they fail tells, for want of what they are to do."""
    pipes = {
        "stdin": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }  # the end of the first would end one of them
    command, environment = (
        [sys.executable, "-P", "-u", "-m", module],
        usual(**{ADDRESS: WARM.address(), CHECKED_ADDRESS: WARM_CHECKED.address()}, **more),
    )
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stderr is not None
        assert "tests/warm.py" in process.stderr.read()
        assert process.wait() == 1


def test_servers_of_ridgeline_are_forks(tmp_path: Path) -> None:
    """As a module tells that they import."""
    (tmp_path / "telling.py").write_text(TELLING)
    words = ["kvserver", "--beside", "--workers", "1", "--import", "telling"]
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", *words],
        cwd=tmp_path,
        env=usual(**{ADDRESS: WARM.address()}),
        stdin=subprocess.DEVNULL,  # nobody wants it
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
