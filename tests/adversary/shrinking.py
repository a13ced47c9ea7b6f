"""Making a failing program small: whatever can be left out without losing the failure is."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from adversary.program import Program

SECONDS = 10.0
"""For one program; what was reached by then is kept."""


def shrink(
    program: Program, is_failing: Callable[[Program], bool], seconds: float = SECONDS
) -> Program:
    """The smallest program found that still fails in the same way.

    Args:
        program: It fails.
        is_failing: Whether another one fails in the same way.
        seconds: After which no more is tried.
    """
    end = time.monotonic() + seconds
    smaller: Program | None = program
    while smaller is not None:
        program = smaller
        smaller = next(
            (one for one in _smaller(program) if time.monotonic() < end and is_failing(one)), None
        )
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with something left out, what saves most first."""
    calls = program.calls
    for size in (4, 2, 1):
        for start in reversed(range(len(calls) - size + 1)):
            left = calls[:start] + calls[start + size :]
            if left:
                yield dataclasses.replace(program, calls=left)
    for use in program.uses:
        left_calls = tuple(
            dataclasses.replace(call, change=None)
            if call.change is not None and call.change.number == use.number
            else call
            for call in calls
        )
        uses = tuple(other for other in program.uses if other != use)
        yield dataclasses.replace(program, uses=uses, calls=left_calls)
    for index, call in enumerate(calls):
        for simpler in (
            dataclasses.replace(call, change=None),
            dataclasses.replace(call, input="plain"),
            dataclasses.replace(call, context="plain"),
        ):
            if simpler != call:
                yield dataclasses.replace(
                    program, calls=(*calls[:index], simpler, *calls[index + 1 :])
                )
    if program.optimizer != "sgd":
        yield dataclasses.replace(program, optimizer="sgd")
