"""Child processes that run programs: killed when one takes too long, replaced when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from adversary.judging import Verdict
from adversary.program import Program, from_json, to_json

TESTS = Path(__file__).resolve().parents[1]
PROGRAMS_EACH = 200
"""Programs that a child runs before a new one takes over: the compiler keeps some memory of each."""

MOST_SAID = 2000
"""Characters of what a process that died had written to its standard error."""


class Child:
    """One process that runs one program after the other.

    Args:
        limit_s: Seconds for one program in one mode, with making it small.
        interprets: Nothing is compiled, see `interpreting`.
        device: Of its modes, `cpu` or `cuda`; a failure there may be the last thing that a process does well.
        gpu: The one that it sees; all that this process sees where empty.
    """

    def __init__(
        self, limit_s: float, *, interprets: bool, device: str = "cpu", gpu: str = ""
    ) -> None:
        self._limit_s = limit_s
        self._interprets = interprets
        self._device = device
        self._gpu = gpu
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False
        self._num_run = 0
        self._folder = tempfile.TemporaryDirectory(
            prefix="adversary-"
        )  # a killed child leaves files
        self._errors = Path(self._folder.name) / "errors.txt"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._folder.cleanup()

    def examine(self, program: Program, mode: str, *, shrinks: bool) -> tuple[Verdict, Program]:
        """The verdict on a program; a hang and a dead process are failures too."""
        process = self._ready()
        assert process.stdin is not None
        request = {"program": json.loads(to_json(program)), "mode": mode, "shrinks": shrinks}
        with contextlib.suppress(
            BrokenPipeError
        ):  # of one that was killed: there will be no answer
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        line, is_late = self._line(process)
        if line.endswith(b"\n"):
            self._num_run += 1
            reply: dict[str, Any] = json.loads(line)
            verdict = Verdict(**{**reply["verdict"], "paths": tuple(reply["verdict"]["paths"])})
            if verdict.outcome == "failed" and self._device != "cpu":
                self._end()
            return verdict, from_json(json.dumps(reply["program"]))
        self._end()
        said = self._errors.read_text(errors="replace")[-MOST_SAID:]
        if is_late:
            detail = f"no answer in {self._limit_s:.0f} s\n{said}"
            return Verdict(mode, "failed", "hangs", detail=detail), program
        detail = f"exit status {process.returncode}\n{said}"
        return Verdict(mode, "failed", "crashes", detail=detail), program

    def _line(self, process: subprocess.Popen[bytes]) -> tuple[bytes, bool]:
        """What it answers, and whether it took too long."""
        assert process.stdout is not None
        end, line = time.monotonic() + self._limit_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    return line, True
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    return line, False
                line += part
        return line, False

    def _ready(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._num_run >= PROGRAMS_EACH:
            self._end()
        if self._process is None:
            flags = ["--interpret"] if self._interprets else []
            with self._errors.open("wb") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "adversary.worker", self._folder.name, *flags],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=self._environment(),
                )
            self._num_run = 0
            if self._is_killed:
                self._process.kill()
        return self._process

    def _environment(self) -> dict[str, str]:
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a pool would outlive a killed child
            "XDG_CACHE_HOME": self._folder.name,  # plans that others have chosen are not for this run
            "OMP_NUM_THREADS": "1",  # what computes here is small, and there are many such processes
            # What only calls the kernels takes longer to optimise than they take to compile.
            "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        }
        if self._device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        elif self._gpu:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpu
        return environment

    def kill(self) -> None:
        """End what runs or begins, from another thread: who waits for its answer is told that it crashed."""
        self._is_killed = True
        process = self._process
        if process is not None:
            process.kill()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
