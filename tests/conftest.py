"""What every test must leave as it found it, and which tests see the host's GPUs.

A test leaves threads, child processes, environment and process group as they were. One that is not marked `gpu`
is about the CPU, as the processes that it starts are, also where the host has GPUs.
"""

import contextlib
import functools
import gc
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Before OpenMP is loaded, here and in child processes. Threads that spin for work take cores from the other
# tests: small networks then train for more than twice as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# What only calls the kernels of a package takes longer to optimise than they take to compile.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Nor does anybody look for its lines in a debugger.
os.environ.setdefault("AOT_INDUCTOR_ENABLE_LINE_TABLES", "0")

VECTORS = ("avx512f", "avx512vnni", "avx512bf16", "amx-tile", "amx-bf16", "amx-int8")
"""Instructions for which torch's compiler may make programs on a processor that has them."""


def _makes_vectors() -> bool:
    """Whether the C++ compiler knows them all, so that what the processor has can be used without a trial.

    Torch tries each kind in each process that compiles: 1 s of CPU, and 6 s where its cache is another.
    """
    flags = [f"-m{name}" for name in VECTORS]
    command = [os.environ.get("CXX", "g++"), *flags, "-E", "-x", "c++", os.devnull]
    with contextlib.suppress(OSError):  # no compiler
        return not subprocess.run(command, capture_output=True, check=False).returncode
    return False


if _makes_vectors():
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Modules that tests of several folders share, also where one folder runs alone.
sys.path.append(str(Path(__file__).parent))

# What processes do first, this one and those that it starts, which get the one or the other list.
STARTS = str(Path(__file__).parent / "starts")
sys.path.append(STARTS)
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), STARTS])
gc.set_threshold(50_000, 10, 10)

GRACE_S = 30.0
"""What is already on its way out may take this long; a test that leaves nothing waits for nothing."""

GPU_LIMIT_S = 600
"""Guards tests on GPUs against hangs, where they bring no limit of their own."""

FOUND_BY_NAME = ("gpu", "quiet", "alone")
"""Marks that `make test` finds in the text of files, to collect no others where it runs only those."""

LONG = (
    "session/",
    "hosts/",
    "experiments/",
    "kvstore/",
    "adversary/",
    "cli_train/",
    "hybrid/",
    "decision/",
)
"""Folders with files that take minutes come first: at the end no process then waits long for another one's."""

MOST_OBJECTS = 50_000
"""Beside those set aside, when these are looked at again. Those of torch and its compiler are eight times as many."""

MANY_MODULES = 100
"""Of torch's compiler there are more than a thousand."""

# pytest writes the current test; scikit-learn and torch's compiler set defaults when first imported.
SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "KMP_", "TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")

KEPT_THREADS = ("InductorSubproc", "subproc_worker_timer", "tqdm_monitor")
"""The reader and the timer of the compiler's workers, and the watch of its progress bar: all live as long as
the process."""

TRACE = "torch.__trace"
"""Logger of what torch's compiler does, in full."""

OWN_THREADS = "/proc/self/task"
"""Where Linux lists this process's threads, each with the processes that it started."""

OF_THE_USER = (
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("RIDGELINE_KVSTORE_KEYS", "RIDGELINE_KVSTORE_JOIN", "RIDGELINE_KVSTORE_SHARED"),
)
"""What the shell that starts the tests may say of its terminal, or of a store that it trains with."""

_hiding: list[pytest.MonkeyPatch] = []


def pytest_configure(config: pytest.Config) -> None:
    """A shell that starts the tests in the background has them ignore interrupts, and all that they start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not in a process that has others run the tests.
    if not config.getoption("numprocesses", None):
        from hypothesis import HealthCheck, settings

        # Which keep the environment that they find.
        from warm import ADDRESS, CHECKED_ADDRESS, WARM, WARM_CHECKED

        addresses = {ADDRESS: WARM.address(), CHECKED_ADDRESS: WARM_CHECKED.address()}
        os.environ.update(addresses)
        # Laws state results, never speed: neither an example nor drawing one has a limit. Nor chance: all runs have
        # the same examples, until someone asks for others by `--hypothesis-seed`, as `make evidence` does. Before
        # any module of tests is read, since a law has the settings of the moment at which it was defined.
        settings.register_profile(
            "ridgeline",
            max_examples=60,
            deadline=None,
            derandomize=config.getoption("--hypothesis-seed") is None,
            suppress_health_check=[HealthCheck.too_slow],
        )
        settings.load_profile("ridgeline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that compare times on a GPU come first, in a fresh process; then others on GPUs; then long ones.

    What torch learns of a host without GPUs it keeps, so that tests on GPUs must not come later. These get more
    time: many run torch's compiler, which takes minutes where a dozen workers share the cores.
    """
    items.sort(key=_turn)
    for mark, path in {(m.name, i.path) for i in items for m in i.iter_markers()}:
        if mark in FOUND_BY_NAME and f"pytest.mark.{mark}" not in path.read_text():
            raise pytest.UsageError(
                f"wanted pytest.mark.{mark} in the text of {path}, whose tests have that mark, got another "
                "spelling; write it out: make test finds the file by it"
            )
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(GPU_LIMIT_S))


def pytest_collection_finish() -> None:
    """Before pytest has handlers for all tests."""
    _leave_trace_off()


def _leave_trace_off() -> None:
    """The compiler's own trace, as it is where nobody asks for it.

    It is on where its logger has a handler: texts of all graphs and guards are made then, for 5 % of the CPU of what
    compiles. For what it captures, pytest has handlers at each logger that hands nothing on to others, as this does
    from where torch is imported.
    """
    logging.getLogger(TRACE).propagate = True


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("gpu") is None:
        name = item.nodeid.removeprefix("tests/")
        return 2 + next((turn for turn, one in enumerate(LONG) if name.startswith(one)), len(LONG))
    return 0 if item.get_closest_marker("quiet") is not None else 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: hide the GPUs from tests of the CPU, and have each draw the same in every run."""
    if item.get_closest_marker("gpu") is None:
        _hide_gpus()
    else:
        _show_gpus()
    _leave_trace_off()
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # That of all devices writes the stack down for each kind that is not there: 0.4 ms, and the text stays.
        is_cpu = item.get_closest_marker("gpu") is None
        (torch.default_generator if is_cpu else torch).manual_seed(seed)


def pytest_unconfigure() -> None:
    """Leave the process as it was, and end those in whose forks scripts ran."""
    _show_gpus()
    if "warm" in sys.modules:
        from warm import ADDRESS, CHECKED_ADDRESS, WARM, WARM_CHECKED

        for name, one in {ADDRESS: WARM, CHECKED_ADDRESS: WARM_CHECKED}.items():
            os.environ.pop(name, None)
            one.close()


def _hide_gpus() -> None:
    if not _hiding:
        _hiding.append(pytest.MonkeyPatch())
        # For child processes, and for a torch that has not looked yet; one that has does not look again.
        _hiding[0].setenv("CUDA_VISIBLE_DEVICES", "")
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        _hiding[0].setattr(torch.cuda, "is_available", lambda: False)
        _hiding[0].setattr(torch.cuda, "device_count", lambda: 0)


def _show_gpus() -> None:
    while _hiding:
        _hiding.pop().undo()


@pytest.fixture(scope="session", autouse=True)
def own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep machine profiles measured by tests out of the user's cache, and what the user has set out of tests.

    Programs are linked by gold where there is one: GNU's other linker takes twice as long to find names in torch's
    libraries, and a quarter of what the compiler takes for a small program.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        if (gold := shutil.which("ld.gold")) and "COMPILER_PATH" not in os.environ:
            linkers = tmp_path_factory.mktemp("linkers")
            (linkers / "ld").symlink_to(gold)
            patch.setenv("COMPILER_PATH", str(linkers))  # where g++ looks first for what it calls
        for name in OF_THE_USER:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def lasting_objects_set_aside(request: pytest.FixtureRequest) -> None:
    """Garbage collections then look at what tests make, and not at what was imported, for 0.3 s each.

    Steps of graphs collect when they are closed, and traces of steps when they end, so that this was half of what
    some files took.
    """
    _set_aside(request.path, len(sys.modules) // MANY_MODULES)


@functools.lru_cache(maxsize=1)
def _set_aside(_file: Path, _hundreds: int) -> None:
    """Once a file, and again where many modules were imported meanwhile, as by its first test that compiles."""
    if len(gc.get_objects()) > MOST_OBJECTS:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaks a thread, a child process, an environment variable or a process group.

    Nor may it leave torch's compiler with another function that makes code, as patches do that do not end in
    the reverse order of their beginnings.
    """
    environment = _environment()
    codegen = _codegen()
    threads = set(threading.enumerate())
    children = set(_children())
    yield
    leaks = [
        *_close_process_group(),
        *_restore_environment(environment),
        *_left_threads(threads),
        *_left_children(children),
        *_restore_codegen(codegen),
    ]
    if leaks:
        pytest.fail("the test left behind: " + "; ".join(leaks), pytrace=False)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(SET_BY_OTHERS)}


def _restore_environment(before: dict[str, str]) -> list[str]:
    after = _environment()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    return [f"environment variable {name} changed" for name in changed]


def _codegen() -> Any:
    """What makes code of a graph in torch's compiler; None where that was not imported yet."""
    compiler = sys.modules.get("torch._inductor.compile_fx")
    return None if compiler is None else compiler.fx_codegen_and_compile


def _restore_codegen(before: Any) -> list[str]:
    if before is None or _codegen() is before:
        return []
    sys.modules["torch._inductor.compile_fx"].fx_codegen_and_compile = before
    return ["torch's compiler makes code in another way"]


def _left_threads(before: set[threading.Thread]) -> list[str]:
    kept = _compiler_threads()
    left = [
        t
        for t in threading.enumerate()
        # A dummy stands for a thread of torch's own, which Python did not start and cannot join.
        if t not in before and t not in kept and not isinstance(t, threading._DummyThread)
    ]
    for thread in left:
        thread.join(GRACE_S)
    return [f"thread {thread.name}" for thread in left if thread.is_alive()]


def _compiler_threads() -> set[threading.Thread]:
    """The threads that torch's compiler keeps for good, once it has compiled something."""
    named = {t for t in threading.enumerate() if t.name in KEPT_THREADS}
    compiling = sys.modules.get("torch._inductor.async_compile")
    pool = None if compiling is None else compiling.AsyncCompile.pool
    # Asking for a pool that nobody needed yet would make one.
    has_pool = pool is not None and pool.cache_info().currsize
    return named | (set(pool()._threads) if has_pool else set())


def _children() -> list[psutil.Process]:
    """Child processes that still run, without the helpers that Python and the compiler keep for good."""
    return [process for process in _all_children() if not _is_kept(process)]


def _all_children() -> list[psutil.Process]:
    """As the kernel lists them, since psutil reads of every process of the host whose child it is: 3 ms."""
    found = []
    try:
        for thread in os.listdir(OWN_THREADS):  # noqa: PTH208 - names, twice a test
            pids = Path(OWN_THREADS, thread, "children").read_text().split()
            found += [psutil.Process(int(pid)) for pid in pids]
    except (OSError, psutil.NoSuchProcess):  # no such list here, or one ended meanwhile
        return psutil.Process().children()
    return found


def _is_kept(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        is_over = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    kept = (
        *("resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker"),
        "tests/warm.py",  # ends with this process
    )
    return is_over or any(name in command for name in kept)


def _left_children(before: set[psutil.Process]) -> list[str]:
    left = [process for process in _children() if process not in before]
    _, alive = psutil.wait_procs(left, timeout=GRACE_S)
    names = [f"child process {process.pid} ({process.name()})" for process in alive]
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return names


def _close_process_group() -> list[str]:
    # Looking into a torch that nobody imported would import it, and cost seconds.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    distributed.destroy_process_group()
    return ["an open torch process group"]
