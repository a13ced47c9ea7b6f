"""Which programs torch's compiler made, or took from its cache, while a plan was tried."""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import msgspec

from ridgeline.compiled_program import CompilerProgram
from ridgeline.errors import first_line
from ridgeline.programs.output_code import HEAD, UNREADABLE, read_program
from ridgeline.timeline import Timeline

_CACHE = "torch._inductor.codecache"


class LoadedPrograms(NamedTuple):
    """Programs in the order in which a step runs them, and why there are none."""

    programs: tuple[CompilerProgram, ...]
    notes: tuple[str, ...] = ()


class ProgramWatch:
    """Remembers which modules of the compiler this process holds, and reads those that come later."""

    def __init__(self) -> None:
        self._before = _modules()

    def read(self) -> LoadedPrograms:
        """What was loaded since this was made; nothing, with a note, where one program cannot be understood.

        A part of a step says nothing about the whole, so one unreadable program hides the others.

        Cost: Up to half a second for each program of some hundred kernels.
        """
        known = {id(module) for module in self._before}
        return read_modules(module for module in _modules() if id(module) not in known)

    def noted(self, trial: Timeline) -> Timeline:
        """The timeline of a trial with the programs that were loaded for it, or a note why there are none.

        A trial that shares what an earlier one compiled loads none.
        """
        found = self.read()
        return msgspec.structs.replace(
            trial, programs=found.programs, notes=(*trial.notes, *found.notes)
        )


def read_modules(modules: Iterable[ModuleType]) -> LoadedPrograms:
    """The programs of such modules: forward passes, then backward passes against the order given.

    Args:
        modules: Loaded by the compiler, each forward pass before its backward; those with a single kernel are
            left out.
    """
    forward: list[CompilerProgram] = []
    backward: list[CompilerProgram] = []
    for module in modules:
        path = str(module.__file__)
        try:
            source = Path(path).read_text(encoding="utf-8")
            if not HEAD.match(source):
                continue
            program = read_program(source)
        except (OSError, *UNREADABLE) as error:
            reason = first_line(error, type(error).__name__)
            note = (
                f"what the compiler made could not be read from {path} ({reason}): its kernels stay as "
                "assumed"
            )
            return LoadedPrograms((), (note,))
        (backward if program.phase == "backward" else forward).append(program)
    return LoadedPrograms((*forward, *reversed(backward)))


def _modules() -> tuple[ModuleType, ...]:
    """What the compiler has loaded; before its first use it is not imported, which takes seconds."""
    cache = sys.modules.get(_CACHE)
    return tuple(cache.PyCodeCache.modules) if cache is not None else ()
