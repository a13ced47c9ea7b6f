"""Workers that stay while a module's tests ask them for means: one start, and one import of torch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

SCRIPT = Path(__file__).parent / "exact_worker.py"


class Workers:
    """Four workers over gloo, of whom two, three or all answer."""

    def __init__(self) -> None:
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            env={**os.environ, **place, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, kind: str, size: int, **case: Any) -> list[dict[str, Any]]:
        """What each of so many workers says, by rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"kind": kind, "size": size, "options": {}, **case})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        told: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        failed = [one["failed"] for one in told if "failed" in one]
        assert not failed, failed[0]
        return told

    def __enter__(self) -> Self:
        """The workers themselves."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End them, by the end of their input."""
        self._process.communicate()
