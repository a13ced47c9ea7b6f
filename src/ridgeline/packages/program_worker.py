"""The child that runs programs of torch's compiler before the process that trains does.

It gets files by its standard input, one a line, and answers each with a line on its standard output. What
a program does to memory that is not its own shows at fences around its tensors.
"""

import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from ridgeline.errors import first_line
from ridgeline.lint.fences import Fences
from ridgeline.packages.package import load_compiled
from ridgeline.workers.host_threads import set_threads
from ridgeline.workers.worker_process import end_well, end_with_parent

RUNS = 2
"""The second meets memory as the first has left it."""


class ProgramAnswer(msgspec.Struct, frozen=True):
    """How a program ran: what it wrote outside of its memory, or what Python raised; both empty if well."""

    broken: tuple[str, ...] = ()
    error: str = ""


def main(parent: str) -> None:
    """Run what is asked for until the parent closes the line."""
    end_with_parent(int(parent))
    # It is meant to crash at times, and would leave gigabytes of core files.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what programs print goes to the log
    for line in sys.stdin:
        answers.write(msgspec.json.encode(_attempt(line.rstrip("\n"))) + b"\n")
    end_well()


def _attempt(path: str) -> ProgramAnswer:
    try:
        # Tensors, numbers and text alone: nothing of the user's is rebuilt here.
        asked = torch.load(path, weights_only=True)
        return ProgramAnswer(broken=_broken_by(asked))
    except Exception as error:  # noqa: BLE001 - whatever it was is reported to the parent
        traceback.print_exc()
        return ProgramAnswer(error=f"{type(error).__name__}: {first_line(error)}")


def _broken_by(asked: dict[str, Any]) -> tuple[str, ...]:
    """Run a program with fences around whatever it may write to; what it broke."""
    set_threads(asked["threads"])
    fences = Fences()
    if "package" in asked:
        call = load_compiled(Path(asked["package"]), torch.device("cpu"))
    else:
        call = _loaded(asked, fences)
    with torch.no_grad():
        for _ in range(RUNS):
            call(fences.copies(asked["inputs"]))
    fences.check()
    return tuple(fences.broken)


def _loaded(asked: dict[str, Any], fences: Fences) -> Callable[[list[Any]], Any]:
    """The call of a program that was compiled in a process, which allocates by our fences."""
    from torch._inductor.codecache import PyCodeCache

    module: Any = PyCodeCache.load(asked["source"])
    vars(module).update(asked["constants"])
    module.empty_strided_cpu = fences.empty_strided
    return module.call


if __name__ == "__main__":
    main(*sys.argv[1:])
