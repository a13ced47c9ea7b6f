"""Workers that stay while a module's tests ask them for something: one start, and one import of torch.

A script of theirs answers lines of JSON by lines of JSON, as `sync/exact_worker.py` does.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torchrun import talking


class Workers:
    """Four workers over gloo that run a script, of whom two, three or all answer."""

    def __init__(self, script: Path) -> None:
        self._process = talking(4, script)

    def ask(self, kind: str, size: int, **case: Any) -> list[dict[str, Any]]:
        """What each of so many workers says to a case, by rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = json.dumps({"kind": kind, "size": size, "options": {}, **case})
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        told = self._process.stdout.readline()
        assert told, "a worker failed, as its output says"
        answers: list[dict[str, Any]] = json.loads(told)
        return answers

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
