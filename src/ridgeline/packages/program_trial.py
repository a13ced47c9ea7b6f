"""Programs of torch's compiler for a CPU run in a child process first, since a wrong one ruins its process.

A vectorised loop with a wrong index writes over the heap, and the process that trains ends with it, minutes
later perhaps. The child gets the program that the compiler wrote and the tensors of its first call: no code
of the user's, so that it does not matter how the step was defined. What ran well is not tried again, in later
processes neither, for as long as the compiler's cache holds it.
"""

import contextlib
import hashlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from ridgeline.errors import CaptureError
from ridgeline.host.signal_names import signal_name
from ridgeline.lint.child_trial import LIMIT_S, child_environment
from ridgeline.lint.child_worker import LOG, is_trial, last_lines
from ridgeline.packages.program_worker import ProgramAnswer

_WORKER = "ridgeline.packages.program_worker"
_LOOK_S = 0.2
_CHECKED_HEAP = {"MALLOC_CHECK_": "3"}
_HEAP_CHECKER = "libc_malloc_debug.so.0"
"""Has glibc, since its version 2.34, look at what packaged programs, which allocate by themselves, did to the
heap. A loader that has none says so and continues. Source: mallopt(3)."""
_FORMAT = "1"
"""Of what is remembered; another where the child looks for more."""
_trying: list[tuple["_Child", list[str]]] = []
"""The child of the trial that is under way in this process, and the notes of that."""
_PLAIN = (int, float, bool, str, type(None))


@contextlib.contextmanager
def programs_tried_first(notes: list[str]) -> Iterator[None]:
    """Inside, what torch's compiler made for a CPU runs in a child process before its first call here.

    Raises:
        CaptureError: instead of a call of a program that crashed there, or wrote outside of its memory.

    Cost: A child with torch for the first program that is not known yet: some 3 to 6 s on a 2-core CPU,
        beside 15 to 25 s of compiling. For each such program a copy of its inputs on disk, and two runs.
        Nothing measurable where the compiler's cache knows the step.
    """
    if is_trial():
        yield
        return
    from torch._inductor.output_code import CompiledFxGraph

    plain: Callable[[Any, Sequence[Any]], Any] = CompiledFxGraph.__call__
    met: dict[Any, Any] = {}  # holds the programs, so that no other gets the number of one
    with _Child() as child:

        @wraps(plain)
        def tried(program: Any, inputs: Sequence[Any]) -> Any:
            # A look in each call is a dictionary's, as the digest of the source would cost more than a small
            # program.
            key = id(program), _shapes(inputs)
            if key not in met and set(program.device_types) <= {"cpu"}:
                asked = {"source": program.source_code, "constants": program.constants or {}}
                _try_once(child, program.source_code, asked, inputs, notes)
                met[key] = program
            return plain(program, inputs)

        before, _trying[:] = list(_trying), [(child, notes)]
        CompiledFxGraph.__call__ = tried  # type: ignore[method-assign]
        try:
            yield
        finally:
            CompiledFxGraph.__call__ = plain  # type: ignore[method-assign]
            _trying[:] = before


def try_package(path: Path, inputs: Sequence[Tensor]) -> None:
    """Where programs are tried first, have the child run one that was compiled ahead of time for a CPU.

    Raises:
        CaptureError: it crashed there, or wrote outside of its memory.
    """
    if _trying and all(tensor.device.type == "cpu" for tensor in inputs):
        child, notes = _trying[-1]
        code = hashlib.sha256(path.read_bytes()).hexdigest()
        _try_once(child, code, {"package": str(path), "constants": {}}, inputs, notes)


def _try_once(
    child: "_Child", code: str, asked: dict[str, Any], inputs: Sequence[Any], notes: list[str]
) -> None:
    """Have the child run a program that is not known to run well, and remember it if it did."""
    mark = _mark(code, inputs)
    if not mark.exists() and _ran_well(child, asked, inputs, notes):
        with contextlib.suppress(OSError):  # then it is tried again next time
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()


def _ran_well(
    child: "_Child", asked: dict[str, Any], inputs: Sequence[Any], notes: list[str]
) -> bool:
    """Whether the child ran the program; if it could not be tried, that is noted.

    Raises:
        CaptureError: it ended the child, or wrote outside of its memory.
    """
    constants = asked["constants"]
    leaves = (*inputs, *constants.values())
    odd = next((value for value in leaves if not _is_plain(value)), None)
    if odd is not None:
        notes.append(
            f"a compiled program was not tried in a child: it takes a {type(odd).__name__}"
        )
        return False
    words, error = child.run({
        **asked,
        "constants": {name: value.detach() for name, value in constants.items()},
        "inputs": [v.detach() if isinstance(v, Tensor) else v for v in inputs],
        "threads": torch.get_num_threads(),
    })  # fmt: skip
    if words:
        raise CaptureError(
            f"wanted a compiled program that leaves the memory of others alone, got one that {words} in a "
            f"child process; this process did not run it. That is an error of the compiler of torch "
            f"{torch.__version__}, and torch.compile makes the same program: use execution='eager', or "
            "another release of torch"
        )
    if error:
        # Python raises that here as well, where it does no harm.
        notes.append(f"a compiled program could not be tried in a child: {error}")
    return not error


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        is_own = type(value) in (Tensor, torch.nn.Parameter)
        return is_own and value.layout is torch.strided and value.device.type == "cpu"
    return isinstance(value, _PLAIN)


def _mark(code: str, inputs: Sequence[Any]) -> Path:
    """The file that says that a program ran well on such inputs: its source, or a digest of a package."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    known = (_FORMAT, torch.__version__, torch.get_num_threads(), code, _shapes(inputs))
    return Path(cache_dir()) / "ridgeline-ran" / hashlib.sha256(repr(known).encode()).hexdigest()


def _shapes(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (tuple(v.shape), v.stride(), v.storage_offset(), v.dtype)
        if isinstance(v, Tensor) and v.layout is torch.strided
        else repr(v)
        for v in inputs
    )


class _Child:
    """A process that runs programs, started with the first and again after one has ended it."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ridgeline-trial-")
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._directory.cleanup()

    def run(self, asked: dict[str, Any]) -> tuple[str, str]:
        """What the program did to its process, and what kept it from running; both empty if it ran well."""
        file = Path(self._directory.name) / "program.pt"
        try:
            torch.save(asked, file)
            process = self._process or self._start()
        except (OSError, RuntimeError) as error:
            return "", f"{type(error).__name__}: {error}"
        line = self._answer(process, file)
        if line is None:
            self._end()
            return f"did not end within {LIMIT_S:g} s", ""
        if not line.endswith(b"\n"):
            code = process.wait()
            self._end()
            how = f"ended its process with {signal_name(-code) if code < 0 else f'status {code}'}"
            return how + last_lines(Path(self._directory.name)), ""
        answer = msgspec.json.decode(line, type=ProgramAnswer)
        return "wrote " + ", ".join(answer.broken[:3]) if answer.broken else "", answer.error

    def _start(self) -> "subprocess.Popen[bytes]":
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        environment = child_environment() | {
            "TORCHINDUCTOR_CACHE_DIR": cache_dir(),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            **_CHECKED_HEAP,
        }
        environment.setdefault("LD_PRELOAD", _HEAP_CHECKER)
        with (Path(self._directory.name) / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-m", _WORKER, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                # A group of its own, so that compilers that it starts end with it.
                start_new_session=True,
            )
        return self._process

    def _answer(self, process: "subprocess.Popen[bytes]", file: Path) -> bytes | None:
        """The line that the child writes; the beginning of one where it ended, None where it does not."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended, and so does its output
            process.stdin.write(f"{file}\n".encode())
            process.stdin.flush()
        line, until = b"", time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            # In pieces, so that the limit of a trial gets through.
            if select.select([process.stdout], [], [], _LOOK_S)[0]:
                more = os.read(process.stdout.fileno(), 1 << 16)
                line += more
                if not more or line.endswith(b"\n"):
                    return line
        return None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
            process.wait()
