"""Which programs torch's compiler made, or took from its cache, while a plan was tried."""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ridgeline.compiled_program import CompilerProgram
from ridgeline.runtime.hybrid.output_code import HEAD, UNREADABLE, read_program


class LoadedPrograms(NamedTuple):
    """Programs in the order in which a step runs them, and why there are none."""

    programs: tuple[CompilerProgram, ...]
    notes: tuple[str, ...] = ()


class ProgramWatch:
    """Remembers which modules of the compiler this process holds, and reads those that it loads afterwards."""

    def __init__(self) -> None:
        self._before = _modules()

    def read(self) -> LoadedPrograms:
        """What was loaded since this was made; nothing, with a note, where one program cannot be understood.

        A part of a step tells nothing about the whole, so one unreadable program hides the others.

        Cost: Up to half a second for each program of some hundred kernels.
        """
        known = {id(module) for module in self._before}
        return read_modules(module for module in _modules() if id(module) not in known)


def read_modules(modules: Iterable[ModuleType]) -> LoadedPrograms:
    """The programs of such modules, forward passes first, then backward passes against the order in which they came.

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
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            note = (
                f"what the compiler made could not be read from {path} ({reason}): its kernels stay as assumed"
            )
            return LoadedPrograms((), (note,))
        (backward if program.phase == "backward" else forward).append(program)
    return LoadedPrograms((*forward, *reversed(backward)))


def _modules() -> tuple[ModuleType, ...]:
    from torch._inductor.codecache import PyCodeCache

    return tuple(PyCodeCache.modules)
